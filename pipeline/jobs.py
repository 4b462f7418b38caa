"""Many prompts through an engine: a few at a time, each answer to its prompt, with a progress bar."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from pipeline.errors import EngineDead, shown
from pipeline.llm_outputs import CompletionOutput, PartialResults, RequestOutput
from pipeline.messages import (
    ChatTurn,
    FrontendMessage,
    RequestFailed,
    RequestFinished,
    Sampling,
    TextBlock,
)
from pipeline.running_engine import RunningEngine

_WAIT_S = 0.2
_DRAIN_S = 5.0
"""How long requests may take to end once they are cancelled."""
_NUM_AHEAD = 2
"""Requests handed to the stages beyond those that share rounds."""


@dataclass(slots=True, kw_only=True)
class Job:
    """A prompt on its way: in the end it has an `output` or a `failure`."""

    prompt: str | list[ChatTurn]
    sampling: Sampling
    request_id: str
    token_ids: list[int] = field(default_factory=list)
    output: RequestOutput | None = None
    failure: str | None = None


def run_jobs(engine: RunningEngine, jobs: Sequence[Job], *, max_requests: int, use_tqdm: bool) -> None:
    """Answer all jobs. Whatever ends this early, Ctrl-C for example, cancels what is in flight.

    Raises `EngineDead` when a stage is lost.
    """
    waiting, in_flight = deque(jobs), dict[str, Job]()
    with tqdm(total=len(jobs), desc="prompts", unit="prompt", disable=not use_tqdm) as bar:
        try:
            while waiting or in_flight:
                while waiting and len(in_flight) < max_requests + _NUM_AHEAD:
                    job = waiting.popleft()
                    in_flight[job.request_id] = job
                    _submit(engine, job)
                for event in engine.events(_WAIT_S):
                    bar.update(_take(event, in_flight))
        except EngineDead:
            raise
        except BaseException:
            _cancel(engine, in_flight)
            raise


def outputs_of(jobs: Sequence[Job]) -> list[RequestOutput]:
    """The outputs of answered jobs, in order. Raises `PartialResults` if some failed."""
    outputs = [job.output for job in jobs if job.output is not None]
    if len(outputs) == len(jobs):
        return outputs
    failures = [f"prompt {index}: {job.failure}" for index, job in enumerate(jobs) if job.output is None]
    raise PartialResults(
        f"{len(failures)} of {len(jobs)} prompts could not be answered (the others are in this error's "
        f"outputs): {shown('; '.join(failures), most=500)}",
        [job.output for job in jobs],
    )


def _submit(engine: RunningEngine, job: Job) -> None:
    engine.submit(
        request_id=job.request_id,
        prompt=job.prompt if isinstance(job.prompt, str) else None,
        chat=None if isinstance(job.prompt, str) else job.prompt,
        sampling=job.sampling,
    )


def _take(event: FrontendMessage, in_flight: dict[str, Job]) -> int:
    """Note an event; how many jobs it ended."""
    job = in_flight.get(event.request_id)
    if job is None:
        return 0  # the last words of a job of an earlier call that was interrupted
    match event:
        case TextBlock():
            job.token_ids.extend(event.token_ids)
            return 0
        case RequestFailed():
            job.failure = event.reason
        case RequestFinished():
            job.output = _output(job, event)
    del in_flight[event.request_id]
    return 1


def _output(job: Job, finished: RequestFinished) -> RequestOutput:
    completion = CompletionOutput(
        index=0,
        text=finished.text,
        token_ids=job.token_ids,
        finish_reason=finished.finish_reason.value,
        seed=job.sampling.seed,
    )
    return RequestOutput(
        request_id=job.request_id,
        prompt=job.prompt,
        outputs=[completion],
        num_prompt_tokens=finished.num_prompt_tokens,
        metrics=finished.metrics,
    )


def _cancel(engine: RunningEngine, in_flight: dict[str, Job]) -> None:
    """End what is in flight and wait for it, so that the next call finds the engine idle."""
    for request_id in in_flight:
        engine.cancel(request_id)
    deadline = time.monotonic() + _DRAIN_S
    while in_flight and time.monotonic() < deadline:
        for event in engine.events(_WAIT_S):
            _take(event, in_flight)
