"""The four error classes, told apart by consequence: who has to act, and what still runs afterwards.

Every message says what was expected, what came, and what to change.
"""


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(EngineError):
    """The configuration cannot work. Raised before anything runs; the user changes a key."""


class RequestError(EngineError):
    """One request cannot be served. It fails alone; everything else goes on."""


class ProtocolError(EngineError):
    """A message arrived that its sender should not have sent: a bug, or foreign bytes on a socket."""


class StaleTensor(ProtocolError):
    """A `TensorRef` names a slot that its owner has written again since."""


class EngineDead(EngineError):
    """A stage process was lost, or did not answer in time; the engine cannot go on."""
