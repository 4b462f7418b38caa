"""Who answers what when: systems take turns on every prompt, so that a slow minute hits all of them alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer that is due."""

    label: str
    """Of the system."""
    prompt: int
    """Place among all prompts of the run."""
    repeat: int


def turns(labels: Sequence[str], *, num_prompts: int, repeats: int) -> Iterator[Turn]:
    """All turns. A prompt is answered by every system before the next one is begun.

    Who begins moves on by one with each prompt and with each repeat, so that nobody always follows the same
    neighbour with the same prompt.
    """
    for repeat in range(repeats):
        for prompt in range(num_prompts):
            shift = (prompt + repeat) % len(labels)
            for label in [*labels[shift:], *labels[:shift]]:
                yield Turn(label=label, prompt=prompt, repeat=repeat)
