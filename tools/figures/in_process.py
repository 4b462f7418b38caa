"""Runs a configuration in one thread, the draft always ahead: every branch is done when its outcome comes.

For figures about predictions, not about time: the same stages and messages as in a real run, but no clock has
a say in what is ready, so that the same seed gives the same figures on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from conf.schema import RunConfig
from pipeline.errors import RequestError
from pipeline.inprocess import InProcess
from pipeline.messages import (
    Committed,
    Message,
    ProposalSource,
    RequestFailed,
    Sampling,
    StageName,
    TokenizedRequest,
)
from pipeline.stage import Stage, StageContext
from stages.draft_speculator.stage import DraftSpeculator
from stages.outcome_predictor.stage import OutcomePredictor
from stages.target_verifier.stage import TargetVerifier


@dataclass(slots=True)
class Rounds:
    """What the decode rounds of some requests committed, the last round of each left out: it is cut short."""

    token_ids: list[list[int]] = field(default_factory=list)
    """The output of each request."""
    by_source: dict[ProposalSource, list[int]] = field(default_factory=dict)
    """Tokens of each round, the bonus token included, by where its proposal came from."""

    def count(self, source: ProposalSource) -> int:
        """Rounds with a proposal from there."""
        return len(self.by_source.get(source, ()))

    @property
    def hit_rate(self) -> float:
        """Hits over look-ups; NaN without any."""
        hits, misses = self.count(ProposalSource.HIT), self.count(ProposalSource.BACKUP)
        return hits / (hits + misses) if hits + misses else float("nan")

    def mean(self, source: ProposalSource | None = None) -> float:
        """Tokens a round; NaN without rounds."""
        lengths = [n for key, listed in self.by_source.items() if source in (None, key) for n in listed]
        return sum(lengths) / len(lengths) if lengths else float("nan")


class _Recorder(Stage):
    """Stands where the detokenizer would."""

    accepts = Committed

    def __init__(self) -> None:
        self.committed: dict[str, list[Committed]] = {}

    def setup(self) -> None:
        """Nothing to load."""

    def handle(self, message: Committed) -> None:
        """Keep it."""
        self.committed.setdefault(message.request_id, []).append(message)

    def close(self) -> None:
        """Nothing to release."""

    def has_ended(self, request_id: str) -> bool:
        """Whether the request's last message is here."""
        return any(m.finish_reason is not None for m in self.committed.get(request_id, ()))


def run_in_process(
    config: RunConfig,
    prompts: Sequence[Sequence[int]],
    sampling: Callable[[int], Sampling],
    *,
    order_seed: int | None = None,
) -> Rounds:
    """Answer the prompts, as many at once as the configuration allows.

    config: with resolved models. prompts: token ids. sampling: of the prompt with this index. order_seed:
    draws the order of deliveries and work, for tests; None: the draft side goes first.
    Raises `RequestError` for a prompt that cannot be served.
    """
    recorder = _Recorder()
    stages: dict[StageName, Callable[[StageContext], Stage]] = {
        StageName.DETOKENIZER: lambda context: recorder
    }
    if config.speculation.draft.kind.value != "none":
        stages[StageName.SPECULATOR] = lambda context: DraftSpeculator(config, context)
    if config.speculation.prepare_outcomes:
        stages[StageName.PREDICTOR] = lambda context: OutcomePredictor(config, context)
    # The runtime offers work in this order: the target verifies when the draft has nothing left to do.
    stages[StageName.VERIFIER] = lambda context: TargetVerifier(config, context)
    ids = [str(index) for index in range(len(prompts))]
    with InProcess(stages, msgspec.msgpack.encode(config), order_seed=order_seed) as runtime:
        for index, prompt in enumerate(prompts):
            request = TokenizedRequest(
                request_id=ids[index],
                prompt_token_ids=list(prompt),
                sampling=sampling(index),
                submitted_ns=0,
            )
            runtime.send(StageName.VERIFIER, request)
        runtime.run_until(
            lambda: bool(runtime.outputs) or all(recorder.has_ended(name) for name in ids), max_steps=1 << 40
        )
        _refuse_failures(runtime.outputs)
    return _rounds_of([recorder.committed[name] for name in ids])


def _refuse_failures(outputs: Sequence[Message]) -> None:
    for message in outputs:
        if isinstance(message, RequestFailed):
            raise RequestError(f"prompt {message.request_id}: {message.reason}")


def _rounds_of(committed: Sequence[Sequence[Committed]]) -> Rounds:
    rounds = Rounds()
    for messages in committed:
        rounds.token_ids.append([token for message in messages for token in message.token_ids])
        for message in messages[1:-1]:  # the first is the prefill
            if message.source is not None:
                rounds.by_source.setdefault(message.source, []).append(len(message.token_ids))
    return rounds
