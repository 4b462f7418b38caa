"""The engine as a Python object: a configuration in, requests in, news of them out.

Decides which stages a configuration needs and where they run, and leaves the rest to the supervisor. The
stages are named, not imported. Text in, text out; it knows nothing of models or tokens.
"""

from __future__ import annotations

import contextlib
import os
import time
from types import TracebackType
from typing import Self

import msgspec
import zmq

from conf.schema import DraftKind, RunConfig
from pipeline.control import StageStats
from pipeline.errors import RequestError
from pipeline.given_prompt import check_prompt
from pipeline.log import get_logger
from pipeline.messages import (
    CancelRequest,
    ChatTurn,
    FrontendMessage,
    Sampling,
    StageName,
    SubmitRequest,
)
from pipeline.placement import CorePlan, plan_cores
from pipeline.profiling import EngineProfile
from pipeline.sampling_options import check_sampling
from pipeline.supervisor import Supervisor
from pipeline.topology import StageSpec, usable_cores

_FACTORIES = {
    StageName.TOKENIZER: "stages.tokenizer:build",
    StageName.DETOKENIZER: "stages.detokenizer:build",
    StageName.SPECULATOR: "stages.draft_speculator.stage:build",
    StageName.PREDICTOR: "stages.outcome_predictor.stage:build",
    StageName.VERIFIER: "stages.target_verifier.stage:build",
}

_BUSY_POLL_US = 2000
"""Longer than a hit takes to arrive; a longer wait is a draft step, and a wake-up is nothing beside it."""

_log = get_logger(__name__)


class Engine:
    """One run of the pipeline. A context manager: enter loads the models, leave stops everything.

    While it runs, the thread that started it keeps to the draft's cores, so that it never takes time
    from the target.
    """

    def __init__(self, config: RunConfig, *, load_timeout_s: float = 600.0) -> None:
        """Store what to run. Raises `ConfigError` when it cannot run on this machine's cores.

        config: composed and checked; its models are local folders.
        """
        self._cores_before = usable_cores()
        self._plan = plan_cores(config.placement, self._cores_before)
        self._supervisor = Supervisor(
            build_topology(config, self._plan),
            msgspec.msgpack.encode(config),
            load_timeout_s=load_timeout_s,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pids(self) -> dict[StageName, int]:
        """The process of each stage."""
        return self._supervisor.pids

    def start(self) -> None:
        """Load and start all stages. Raises `ConfigError` and `EngineDead`; everything is stopped then."""
        if self._plan.is_crowded:
            _log.warning(
                "placement=cpu_split: expected at least 2 usable cores, got 1; target and draft share it"
            )
        self.keep_to_draft_cores()
        try:
            self._supervisor.start()
        except BaseException:
            self.leave_draft_cores()
            raise

    def keep_to_draft_cores(self) -> None:
        """Move the calling thread to the draft's cores, where it takes no time from the target."""
        self._move_to(self._plan.draft)

    def leave_draft_cores(self) -> None:
        """Give the calling thread the cores back that this process had."""
        self._move_to(self._cores_before)

    def submit(
        self,
        *,
        request_id: str,
        prompt: str | None = None,
        chat: list[ChatTurn] | None = None,
        prompt_token_ids: list[int] | None = None,
        sampling: Sampling,
        submitted_ns: int | None = None,
    ) -> None:
        """Send a request on its way; give exactly one of `prompt`, `chat` and `prompt_token_ids`.

        submitted_ns: when it came, if it waited before this call; its time to first token counts from there.
        Raises `RequestError` when it is none or several, for token ids that no model has, or when an option
        of `sampling` is out of range, and `EngineDead` when the engine has ended.
        """
        try:
            check_prompt(prompt=prompt, chat=chat, prompt_token_ids=prompt_token_ids)
            check_sampling(sampling)
        except RequestError as error:
            raise RequestError(f"{request_id}: {error}") from None
        request = SubmitRequest(
            request_id=request_id,
            prompt=prompt,
            chat=chat,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            submitted_ns=time.monotonic_ns() if submitted_ns is None else submitted_ns,
        )
        self._supervisor.send(StageName.TOKENIZER, request)

    def cancel(self, request_id: str) -> None:
        """Ask for the end of a request: `RequestFinished` comes, or `RequestFailed` if it had not started.

        Unknown ids are ignored.
        """
        self._supervisor.send(StageName.TOKENIZER, CancelRequest(request_id=request_id))

    def events(self, timeout_s: float) -> list[FrontendMessage]:
        """News of the requests, waiting up to `timeout_s` for the first; an empty list if none came.

        Raises `EngineDead` when a stage was lost: everything is stopped then.
        """
        return self._supervisor.poll(timeout_s)

    def wake_on(self, socket: zmq.Socket[bytes]) -> None:
        """Let `events` return, with or without news, as soon as something waits on `socket`."""
        self._supervisor.wake_on(socket)

    def stats(self, timeout_s: float = 1.0) -> dict[StageName, StageStats]:
        """Current figures of each stage; one too busy to answer in time shows its previous ones.

        Raises `EngineDead` like `events`.
        """
        return self._supervisor.stats(timeout_s)

    def start_profile(self, *, num_spans: int, traces_kernels: bool = False) -> None:
        """Record what the stages do when, until `end_profile`; see `Supervisor.start_profile`."""
        self._supervisor.start_profile(num_spans=num_spans, traces_kernels=traces_kernels)

    def end_profile(self) -> EngineProfile:
        """What was recorded. Raises `EngineDead` like `events`."""
        return self._supervisor.end_profile()

    def stop(self) -> None:
        """Stop all stages, within 5 seconds. May be called twice."""
        try:
            self._supervisor.stop()
        finally:
            self.leave_draft_cores()

    def _move_to(self, cores: tuple[int, ...]) -> None:
        if hasattr(os, "sched_setaffinity"):
            # Moving is an optimisation; a sandbox that forbids it must not end the run.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cores)


def build_topology(config: RunConfig, plan: CorePlan) -> list[StageSpec]:
    """The stages that `config` needs, on the cores of `plan`."""
    speculation = config.speculation
    names = [StageName.TOKENIZER, StageName.DETOKENIZER, StageName.VERIFIER]
    if speculation.draft.kind is not DraftKind.none:
        names.append(StageName.SPECULATOR)
    if speculation.prepare_outcomes:
        names.append(StageName.PREDICTOR)
    threads = {StageName.VERIFIER: len(plan.target), StageName.SPECULATOR: len(plan.draft)}
    # A target with cores of its own has nothing better to do than to watch for the next proposal.
    owns_cores = not set(plan.target) & set(plan.draft)
    waits_for_draft = speculation.draft.kind is not DraftKind.none
    return [
        StageSpec(
            name=name,
            factory=_FACTORIES[name],
            cores=plan.target if name is StageName.VERIFIER else plan.draft,
            io_cores=plan.draft if owns_cores else None,
            busy_poll_us=_BUSY_POLL_US
            if name is StageName.VERIFIER and owns_cores and waits_for_draft
            else 0,
            threads=threads.get(name, 1),
            has_patient_threads=speculation.prepare_outcomes and not owns_cores and threads.get(name, 1) > 1,
        )
        for name in names
    ]
