"""The error classes, told apart by consequence: who has to act, and what still runs afterwards.

Every message says what was expected, what came, and what to change. `ConfigError` and the common base are
defined in `conf.errors`, below this package; import them from here.
"""

from __future__ import annotations

from conf.errors import ConfigError, EngineError, shown, shown_path

__all__ = [
    "ConfigError",
    "EngineDead",
    "EngineError",
    "EngineUnreachable",
    "OutputError",
    "ProtocolError",
    "RequestError",
    "RequestTimeout",
    "StaleTensor",
    "shown",
    "shown_path",
]


class RequestError(EngineError):
    """One request cannot be served. It fails alone; everything else goes on."""


class RequestTimeout(RequestError, TimeoutError):
    """A request took longer than its program allows; it was cancelled."""


class ProtocolError(EngineError):
    """A message arrived that its sender should not have sent: a bug, or foreign bytes on a socket."""


class StaleTensor(ProtocolError):
    """A `TensorRef` names a slot that its owner has written again since."""


class OutputError(EngineError):
    """An answer cannot be written, to a full disk for example. The run ends, as nobody would see the rest."""


class EngineDead(EngineError):
    """A stage process was lost, or did not answer in time; the engine cannot go on."""


class EngineUnreachable(EngineError, ConnectionError):
    """No engine answers at the address that a client was given."""
