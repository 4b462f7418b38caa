"""Messages as the frontend gets them, with made-up figures."""

from collections.abc import Sequence

import msgspec

from pipeline.messages import FinishReason, PlanFigures, RequestFinished, RequestMetrics

METRICS = RequestMetrics(
    num_rounds=11,
    num_proposed_tokens=40,
    num_accepted_tokens=20,
    acceptance_length=31 / 11,
    acceptance_rate=0.5,
    cache_hits=8,
    cache_misses=2,
    hit_rate=0.8,
    mean_ready_length=3.5,
    ttft_ms=20.0,
    decode_seconds=0.3,
    tokens_per_second=100.0,
    target_compute_ms=200.0,
    target_wait_ms=50.0,
    draft_wait_ms=40.0,
    overlap_ms=150.0,
    overhead_ms=5.0,
)

PLANNED = msgspec.structs.replace(
    METRICS,
    num_rest_rounds=3,
    plan=PlanFigures(
        verify_ms=20.5,
        verify_row_ms=0.5,
        step_ms=2.0,
        step_row_ms=0.25,
        acceptance=0.6,
        hit_rate=0.7,
        tokens_per_second=80.0,
        speculative_tokens_per_second=90.0,
        plain_tokens_per_second=48.5,
        least_chance=0.04,
        num_branches=16,
    ),
)
"""Of a run with `plan=auto`."""

NO_SPECULATION = RequestMetrics(
    num_rounds=1,
    num_proposed_tokens=0,
    num_accepted_tokens=0,
    acceptance_length=1.0,
    acceptance_rate=None,
    cache_hits=None,
    cache_misses=None,
    hit_rate=None,
    mean_ready_length=None,
    ttft_ms=10.0,
    decode_seconds=None,
    tokens_per_second=None,
    target_compute_ms=0.0,
    target_wait_ms=0.0,
    draft_wait_ms=0.0,
    overlap_ms=0.0,
    overhead_ms=0.0,
)


def finished(
    request_id: str = "0",
    text: str = "answer",
    *,
    metrics: RequestMetrics = METRICS,
    num_output_tokens: int = 31,
    finish_reason: FinishReason = FinishReason.LENGTH,
    prompt_token_ids: Sequence[int] = (1, 2, 3, 4, 5),
) -> RequestFinished:
    """The end of a request."""
    return RequestFinished(
        request_id=request_id,
        finish_reason=finish_reason,
        text=text,
        num_prompt_tokens=len(prompt_token_ids),
        num_output_tokens=num_output_tokens,
        metrics=metrics,
        prompt_token_ids=list(prompt_token_ids),
    )
