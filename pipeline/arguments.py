"""Splits a command line into what belongs to the run and what belongs to the configuration.

`prompt=`, `prompts_file=`, `output=`, `listen=` and `allow_remote=` are taken out first and as they stand:
what follows the equals sign is the value, whatever it holds. The rest goes to `conf.compose`, where Hydra's
grammar applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ConfigError, shown, shown_path

OWN_KEYS = ("prompt", "prompts_file", "output", "listen", "allow_remote")
"""What is asked by whom; no keys of the configuration."""
_NOT_WITH_LISTEN = ("prompt", "prompts_file", "output")
_HELP = ("--help", "-h", "help")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A command line, split."""

    prompt: str | None
    prompts_file: Path | None
    output: Path | None
    listen: str | None
    """Where to serve clients, instead of answering prompts."""
    allow_remote: bool
    overrides: tuple[str, ...]
    """Everything else, in order: the `key=value` arguments of the configuration."""
    wants_help: bool


def split_arguments(argv: Sequence[str]) -> Arguments:
    """Split the arguments after the program's name.

    Raises `ConfigError` when one of the run's own keys comes twice or empty, for both kinds of prompt, for an
    output that names a folder, and for prompts beside `listen`, whose clients bring theirs.
    """
    own: dict[str, str] = {}
    overrides: list[str] = []
    for argument in argv:
        key, separator, value = argument.partition("=")
        if not (separator and key in OWN_KEYS):
            overrides.append(argument)
            continue
        if key in own:
            advice = "several prompts go into a prompts_file" if key == "prompt" else "leave one out"
            raise ConfigError(f"{key} is given twice, expected it once; {advice}")
        if not value:
            raise ConfigError(f"{key}= is empty, expected {_EXPECTED[key]}")
        own[key] = value
    # Seen here, because `Path` forgets it: FILE/ and FILE/. would quietly replace FILE.
    if own.get("output", "").endswith(("/", "/.")):
        raise ConfigError(
            f"output={shown_path(own['output'])} names a folder, expected a file; "
            "leave out what follows its name"
        )
    if "prompt" in own and "prompts_file" in own:
        raise ConfigError("prompt and prompts_file are both given, expected one of them; leave one out")
    for key in _NOT_WITH_LISTEN:
        if key in own and "listen" in own:
            raise ConfigError(
                f"{key} and listen are both given; with listen, clients send prompts; leave one out"
            )
    allow_remote = own.get("allow_remote", "false")
    if allow_remote not in ("true", "false") or ("allow_remote" in own and "listen" not in own):
        raise ConfigError(
            f"allow_remote={shown(allow_remote)}: expected true or false, beside listen=tcp://HOST:PORT"
        )
    prompts_file, output = own.get("prompts_file"), own.get("output")
    return Arguments(
        prompt=own.get("prompt"),
        prompts_file=Path(prompts_file) if prompts_file is not None else None,
        output=Path(output) if output is not None else None,
        listen=own.get("listen"),
        allow_remote=allow_remote == "true",
        overrides=tuple(argument for argument in overrides if argument not in _HELP),
        wants_help=any(argument in _HELP for argument in overrides),
    )


_EXPECTED = {
    "prompt": "some text; leave it out for the built-in prompts",
    "prompts_file": "the path of a file with prompts",
    "output": "the path of the file to write answers to",
    "listen": "the address to serve clients at, ipc:///PATH or tcp://127.0.0.1:PORT",
    "allow_remote": "true or false",
}
