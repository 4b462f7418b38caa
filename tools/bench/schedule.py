"""Who answers what when: systems take turns on every prompt, so that a slow minute hits all of them alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The answers of one system to one batch that are due."""

    label: str
    """Of the system."""
    temperature: float
    group: int
    """Place among all groups of prompts that are asked at once."""
    repeat: int


def turns(
    labels: Sequence[str], *, temperatures: Sequence[float], num_groups: int, repeats: int
) -> Iterator[Turn]:
    """All turns. A group is answered by every system before the next one is begun.

    Who begins moves on by one with each group and with each repeat, so that nobody always follows the same
    neighbour with the same prompts.
    """
    for repeat in range(repeats):
        for temperature in temperatures:
            for group in range(num_groups):
                shift = (group + repeat) % len(labels)
                for label in [*labels[shift:], *labels[:shift]]:
                    yield Turn(label=label, temperature=temperature, group=group, repeat=repeat)
