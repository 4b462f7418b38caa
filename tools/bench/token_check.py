"""Whether a system said what the baseline said: a speed means nothing for other tokens.

Our systems are exact, so theirs must be equal: in every number format, and when sampled, as all of them draw
the same noise. One whose target has other weights (`model.weights`) has a law of its own, and is compared
with plain decoding of that law instead of the baseline. A peer's must be equal where both sides compute in
float32 or better and choose greedily. In bfloat16 it rounds otherwise, and llama.cpp has formats of its own:
there equality is counted. A peer's noise is another, and the rejection rule (`speculation.verification`) uses
ours otherwise: sampled answers are not compared there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from conf.schema import DType
from tools.bench.entries import Entry
from tools.bench.journal import PromptKey, Row


class Rule(str, Enum):
    """What is expected of a system's tokens."""

    must_match = "must_match"
    may_differ = "may_differ"
    own_draws = "own_draws"
    """Sampled otherwise, with the same law at best: not comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCheck:
    """The comparison of one system's answers with the baseline's."""

    rule: Rule
    num_answers: int
    num_compared: int
    """Answers to prompts that the baseline answered too."""
    num_different: int
    against: str | None = None
    """Whom it was compared with, if not with the baseline."""

    @property
    def is_refused(self) -> bool:
        """Whether the system's speed must not be shown."""
        return self.rule is Rule.must_match and self.num_different > 0

    def __str__(self) -> str:
        where = "" if self.against is None else f" ({self.against})"
        if self.is_refused:
            return f"refused: {self.num_different} of {self.num_compared} answers differ{where}"
        if self.rule is Rule.own_draws:
            return "not compared: other draws"
        if self.num_compared == 0:
            return "not compared: no answers to compare with"
        text = f"{self.num_compared - self.num_different} of {self.num_compared} identical{where}"
        left = self.num_answers - self.num_compared
        return f"{text}, {left} not compared" if left else text


def rule_between(
    entry: Entry, baseline: Entry, *, dtype: DType, temperature: float, is_coupled: bool = True
) -> Rule:
    """What is expected of the answers of `entry`. is_coupled: whether both, as far as they are ours, are."""
    peers = [one.name for one in (entry, baseline) if not one.is_ours]
    if temperature > 0 and (peers or not is_coupled):
        return Rule.own_draws
    if not peers:
        return Rule.must_match
    is_exact = dtype is not DType.bfloat16 and "llama_cpp" not in peers
    return Rule.must_match if is_exact else Rule.may_differ


def reference_tokens(rows: Iterable[Row]) -> dict[PromptKey, list[int]]:
    """The ids for each prompt, of the first repeat."""
    tokens: dict[PromptKey, list[int]] = {}
    for row in sorted(rows, key=lambda row: row.repeat):
        for key, answer in row.answers_by_prompt():
            tokens.setdefault(key, answer.token_ids)
    return tokens


def check_tokens(
    rows: Iterable[Row],
    reference: Mapping[PromptKey, list[int]],
    rule: Rule,
    *,
    against: str | None = None,
) -> TokenCheck:
    """Compare every answer, repeats included. against: whose the reference is, if not the baseline's."""
    num_answers = num_compared = num_different = 0
    for key, answer in (pair for row in rows for pair in row.answers_by_prompt()):
        num_answers += 1
        expected = reference.get(key)
        if expected is not None:
            num_compared += 1
            num_different += answer.token_ids != expected
    return TokenCheck(
        rule=rule,
        num_answers=num_answers,
        num_compared=num_compared,
        num_different=num_different,
        against=against,
    )
