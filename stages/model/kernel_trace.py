"""Traces PyTorch's operators and kernels inside a stage, for a profile that asks for it.

The profiler keeps a clock of its own. So a trace holds marks whose names carry `time.monotonic_ns()`: who
reads the trace learns from them how far the two clocks are apart.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.spans import CLOCK_MARK

_NUM_MARKS = 5
"""The first marks are slow."""


class TorchTracer:
    """One trace of the thread that starts it, and of what it launches. See `pipeline.stage.KernelTracer`."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)

    def start(self) -> None:
        """Trace from now on."""
        self._profile.start()
        for _ in range(_NUM_MARKS):
            with record_function(f"{CLOCK_MARK}{time.monotonic_ns()}"):
                pass

    def stop(self) -> bytes:
        """End the trace and return it: zlib over the profiler's Chrome trace, in JSON."""
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return zlib.compress(path.read_bytes(), level=1)
