"""The draft of an emulated pair: a step lasts what its table says, choosing tokens included.

Published times are those of whole draft steps, in which the next tokens are chosen too. So the clock runs
here and not in the runner, whose forwards take no time of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from conf.schema import RunConfig
from stages.draft_speculator.draft_source import ExtendJob
from stages.draft_speculator.model_draft import ModelDraft
from stages.model.emulated_runner import EmulatedRunner
from stages.model.emulated_times import TimeTable, wait_until


class EmulatedDraft(ModelDraft):
    """`ModelDraft` on an emulated runner."""

    def __init__(self, config: RunConfig, *, num_pages: int, num_ranked: int) -> None:
        """num_pages: of its KV cache. num_ranked: see `ModelDraft`."""
        emulated = config.model.emulated
        self._table = TimeTable(emulated.draft_rows, emulated.draft_ms, scale=emulated.time_scale)
        runner = EmulatedRunner.with_pages(config, is_draft=True, num_pages=num_pages)
        runner.kv.keeps_prefixes = config.placement.prefix_cache
        runner.warm_up()
        super().__init__(runner, vocab_size=runner.shape.vocab_size, num_ranked=num_ranked)

    def extend(self, jobs: Sequence[ExtendJob]) -> None:
        """One step, and the rest of its time."""
        num_rows = sum(len(job.nodes) for job in jobs)
        deadline_ns = time.monotonic_ns() + self._table.ns(num_rows)
        super().extend(jobs)
        wait_until(deadline_ns)
