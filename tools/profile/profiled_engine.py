"""An engine that records what its stages do, from when it is ready until it is stopped."""

from __future__ import annotations

from types import TracebackType

from conf.schema import RunConfig
from pipeline.engine import Engine
from pipeline.profiling import EngineProfile
from tools.profile.settings import ProfileSettings


class ProfiledEngine(Engine):
    """See the module docstring.

    profile: what was recorded, after the end of a run in which no stage was lost.
    """

    def __init__(self, config: RunConfig, settings: ProfileSettings) -> None:
        super().__init__(config)
        self.profile: EngineProfile | None = None
        self._settings = settings

    def start(self) -> None:
        """Start, then record. Raises like `Engine.start`."""
        super().start()
        try:
            self.start_profile(
                num_spans=self._settings.num_spans, traces_kernels=self._settings.torch_profiler
            )
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if exc_type is None:
                self.profile = self.end_profile()
        finally:
            self.stop()
