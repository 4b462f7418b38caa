"""The profile of one stage process: turned on and off by the supervisor, recorded by the stage's thread."""

from __future__ import annotations

import time

from pipeline.control import EndProfile, ProfileStarted, StageProfile, StartProfile
from pipeline.spans import SpanRecorder
from pipeline.stage import KernelTracer, Stage


class ProfileSwitch:
    """Owns the recorder that the stage and its mailboxes write to.

    spans: off until a `StartProfile`.
    """

    def __init__(self) -> None:
        self.spans = SpanRecorder()
        self._tracer: KernelTracer | None = None

    def take(self, command: StartProfile | EndProfile, stage: Stage) -> ProfileStarted | StageProfile:
        """Do what the supervisor asks, and answer. A profile that is on already begins anew."""
        if isinstance(command, EndProfile):
            return self._end()
        self._end_trace()
        if command.traces_kernels and (tracer := stage.kernel_tracer()) is not None:
            self._tracer = tracer
            tracer.start()
        self.spans.start(num_spans=command.num_spans, now_ns=time.monotonic_ns())
        return ProfileStarted()

    def _end(self) -> StageProfile:
        """What was recorded; nothing if no profile was on."""
        dump = self.spans.dump(now_ns=time.monotonic_ns())
        self.spans.stop()
        return StageProfile(spans=dump, kernel_trace=self._end_trace())

    def _end_trace(self) -> bytes | None:
        tracer, self._tracer = self._tracer, None
        return None if tracer is None else tracer.stop()
