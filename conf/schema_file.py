"""Composes a YAML file and `key=value` arguments over a dataclass schema, with Hydra's compose API.

Every command's settings go this way. The compose API and not `@hydra.main`: no `outputs/` folder appears,
paths stay relative to the caller, and every mistake comes out as one `ConfigError` that names the key.
Knows no particular schema, and nothing about which values go together.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.errors import ConfigError, shown
from conf.keys import keys_of

SchemaT = TypeVar("SchemaT")
_ONE_COMPOSITION = threading.Lock()
"""Hydra composes in globals, and a program may make two engines in two threads."""


def parse_arguments(arguments: Sequence[str], *, example: str) -> dict[str, str]:
    """Split `key=value` arguments; example: one such argument, for the error.

    Raises `ConfigError` for an argument without `=`, and for a key given twice: neither value can be meant
    to be lost.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator:
            raise ConfigError(
                f"'{shown(argument)}': expected key=value, for example {example}; --help lists the keys"
            )
        if key in given:
            raise ConfigError(f"{shown(key)} is given twice, expected it once; leave one out")
        given[key] = value
    return given


def check_known(given: Iterable[str], schema: type) -> None:
    """Raise `ConfigError` for the first key that the schema does not have."""
    known = keys_of(schema)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"keys: {', '.join(known)}"
            raise ConfigError(f"{shown(key)}: there is no such key; {advice}")


def compose_schema(
    schema: type[SchemaT],
    *,
    folder: Path,
    file: str,
    given: Mapping[str, str],
    verbatim: Sequence[str] = (),
) -> SchemaT:
    """An instance of `schema`: its defaults, then `folder/file.yaml`, then `given`, key=value by key.

    schema: a dataclass, which the defaults list of the file calls `schema`.
    verbatim: keys of texts that are taken as they stand, because they hold what Hydra's grammar gives a
    meaning to, such as paths. `null` means None where None is the default.
    Raises `ConfigError` for a value of the wrong type or with broken syntax, and for a group file that does
    not exist.
    """
    plain = {key: value for key, value in given.items() if key not in verbatim}
    # Both names are Hydra's globals: the store only has to hold the schema of the composition that follows,
    # and a program that uses Hydra itself must get its own state back.
    with _ONE_COMPOSITION:
        ConfigStore.instance().store(name="schema", node=schema)
        outer = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            with hydra.initialize_config_dir(str(folder), version_base="1.3"):
                composed = hydra.compose(file, [f"{key}={value}" for key, value in plain.items()])
            config = OmegaConf.to_object(composed)
        except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
            # Hydra leaves to Python what is too long a number or too deep a list.
            raise _in_our_words(error, schema, plain) from None
        finally:
            GlobalHydra.instance().hydra = outer
    assert isinstance(config, schema)
    for key in verbatim:
        if key in given:
            is_null = given[key] == "null" and getattr(config, key) is None
            setattr(config, key, None if is_null else given[key])
            if not given[key].strip():
                raise ConfigError(f"{key}= is empty; give it a value or leave it out")
    return config


def _in_our_words(error: Exception, schema: type, given: Mapping[str, str]) -> ConfigError:
    """Name the key whose value was refused, and what it expects."""
    keys = keys_of(schema)
    for cause in (error.__cause__, error):
        key = str(getattr(cause, "full_key", None)).partition("[")[0]  # of a list, whichever element it was
        if key in keys and key in given:
            return ConfigError(f"{key}={shown(given[key])}: expected {keys[key].expects}")
    # Other errors carry no key: they quote the argument that they are about, or only a part of it.
    for key, value in given.items():
        if f"{key}={value}" in str(error) or _is_broken(f"{key}={value}"):
            expects = keys[key].expects if key in keys else "the name of a file"
            return ConfigError(f"{key}={shown(value)}: expected {expects}")
    return ConfigError(shown(" ".join(str(error).split()), most=300))


def _is_broken(argument: str) -> bool:
    """Whether Hydra's grammar refuses this argument."""
    try:
        OverridesParser.create().parse_override(argument)
    except (HydraException, ValueError, RecursionError):
        return True
    return False
