"""The error that a configuration raises, and the base it shares with every other error of the engine.

Here and not in `pipeline.errors`, because `conf` stands below `pipeline`; everyone else imports both
names from there.
"""


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(EngineError):
    """The configuration cannot work. Raised before anything runs; the user changes a key."""
