"""Many prompts through an engine: a few at a time, each answer to its prompt, with a progress bar."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from tqdm import tqdm

from pipeline.errors import EngineDead, shown
from pipeline.given_prompt import GivenPrompt
from pipeline.llm_outputs import CompletionOutput, PartialResults, RequestOutput
from pipeline.messages import (
    FrontendMessage,
    RequestFailed,
    RequestFinished,
    Sampling,
    TextBlock,
)
from pipeline.running_engine import RunningEngine
from pipeline.samples import sample_id, sample_seed

_WAIT_S = 0.2
_DRAIN_S = 5.0
"""How long requests may take to end once they are cancelled."""
_NUM_AHEAD = 2
"""Requests handed to the stages beyond those that share rounds."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One answer on its way; in the end it has `finished` or a `failure`."""

    prompt: GivenPrompt
    prompt_id: str
    """What the prompt is called in its output; a request of several has the sample behind it."""
    prompt_index: int
    """Place among the prompts of the call."""
    sample: int
    """Which of the answers to its prompt it is."""
    sampling: Sampling
    request_id: str
    blocks: list[TextBlock] = field(default_factory=list)
    finished: RequestFinished | None = None
    failure: str | None = None


def jobs_of(
    prompt: GivenPrompt, sampling: Sampling, num_samples: int, *, index: int, request_id: str
) -> list[Job]:
    """The jobs of a prompt, one for each of its answers."""
    return [
        Job(
            prompt=prompt,
            prompt_id=request_id,
            prompt_index=index,
            sample=sample,
            sampling=msgspec.structs.replace(sampling, seed=sample_seed(sampling.seed, sample)),
            request_id=sample_id(request_id, sample, num_samples=num_samples),
        )
        for sample in range(num_samples)
    ]


def run_jobs(engine: RunningEngine, jobs: Sequence[Job], *, max_requests: int, use_tqdm: bool) -> None:
    """Answer all jobs. Whatever ends this early, Ctrl-C for example, cancels what is in flight.

    Raises `EngineDead` when a stage is lost.
    """
    waiting, in_flight = deque(jobs), dict[str, Job]()
    with tqdm(total=len(jobs), desc="answers", unit="answer", disable=not use_tqdm) as bar:
        try:
            while waiting or in_flight:
                while waiting and len(in_flight) < max_requests + _NUM_AHEAD:
                    job = waiting.popleft()
                    in_flight[job.request_id] = job
                    _submit(engine, job)
                num_ended = sum(_take(event, in_flight) for event in engine.events(_WAIT_S))
                if num_ended:
                    bar.update(num_ended)
        except EngineDead:
            raise
        except BaseException:
            _cancel(engine, in_flight)
            raise


def outputs_of(jobs: Sequence[Job]) -> list[RequestOutput]:
    """The outputs of the prompts, in order. Raises `PartialResults` if some have a failed answer.

    jobs: ended, in the order of the prompts, the answers to one prompt one after the other.
    """
    groups = [list(group) for _, group in itertools.groupby(jobs, key=lambda job: job.prompt_index)]
    outputs = [_output(group) for group in groups]
    failures = [f"prompt {job.prompt_index}: {job.failure}" for job in jobs if job.failure is not None]
    if failures:
        num_failed = outputs.count(None)
        raise PartialResults(
            f"{num_failed} of {len(groups)} prompts could not be answered (the others are in this error's "
            f"outputs): {shown('; '.join(failures), most=500)}",
            outputs,
        )
    return [output for output in outputs if output is not None]


def _submit(engine: RunningEngine, job: Job) -> None:
    engine.submit(
        request_id=job.request_id,
        prompt=job.prompt.prompt,
        chat=job.prompt.chat,
        prompt_token_ids=job.prompt.prompt_token_ids,
        sampling=job.sampling,
    )


def _take(event: FrontendMessage, in_flight: dict[str, Job]) -> int:
    """Note an event; how many jobs it ended."""
    job = in_flight.get(event.request_id)
    if job is None:
        return 0  # the last words of a job of an earlier call that was interrupted
    match event:
        case TextBlock():
            job.blocks.append(event)
            return 0
        case RequestFailed():
            job.failure = event.reason
        case RequestFinished():
            job.finished = event
    del in_flight[event.request_id]
    return 1


def _output(jobs: Sequence[Job]) -> RequestOutput | None:
    """The output of one prompt; None if one of its answers failed."""
    ended = [(job, job.finished) for job in jobs if job.finished is not None]
    if len(ended) < len(jobs):
        return None
    completions = [
        CompletionOutput(
            index=job.sample,
            text=finished.text,
            blocks=job.blocks,
            finish_reason=finished.finish_reason.value,
            stop_reason=finished.stop_reason,
            seed=job.sampling.seed,
            metrics=finished.metrics,
        )
        for job, finished in ended
    ]
    first, finished = ended[0]
    return RequestOutput(
        request_id=first.prompt_id,
        prompt=first.prompt.chat if first.prompt.prompt is None else first.prompt.prompt,
        prompt_token_ids=finished.prompt_token_ids,
        outputs=completions,
        num_prompt_tokens=finished.num_prompt_tokens,
    )


def _cancel(engine: RunningEngine, in_flight: dict[str, Job]) -> None:
    """End what is in flight and wait for it, so that the next call finds the engine idle."""
    for request_id in in_flight:
        engine.cancel(request_id)
    deadline = time.monotonic() + _DRAIN_S
    while in_flight and time.monotonic() < deadline:
        for event in engine.events(_WAIT_S):
            _take(event, in_flight)
