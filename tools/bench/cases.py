"""What is varied beside systems and prompts: set-up, batch size, temperature."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.settings import SetUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What a worker is loaded for. Phases come one after the other, so that only one's workers are loaded."""

    setup: SetUp
    batch_size: int

    def __str__(self) -> str:
        return f"{self.setup.value}, batch {self.batch_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a table of figures is about."""

    phase: Phase
    temperature: float

    @property
    def choice(self) -> str:
        """How tokens are chosen, in words."""
        return "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"

    def __str__(self) -> str:
        return f"{self.phase}, {self.choice}"
