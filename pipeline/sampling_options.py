"""Makes the `Sampling` of a request out of a run's keys, and out of options that a user names.

What is not supported is refused by name: an option that is ignored would change answers silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict

import msgspec

from conf.schema import RunConfig
from pipeline.errors import RequestError, shown
from pipeline.messages import Sampling, StructuredOutputs
from pipeline.structured_outputs import (
    check_structured_outputs,
    plain_response_format,
    plain_structured_outputs,
)

_FIELDS = Sampling.__struct_fields__


def sampling_of(config: RunConfig, *, seed: int) -> Sampling:
    """The options of a run's keys."""
    plain = {name: getattr(config, name) for name in _FIELDS if name not in ("seed", "structured_outputs")}
    structured = StructuredOutputs(**asdict(config.structured_outputs))
    is_free = structured == StructuredOutputs()
    return Sampling(**plain, seed=seed, structured_outputs=None if is_free else structured)


def check_sampling(sampling: Sampling) -> None:
    """Raise `RequestError` for an option out of range: constructors of messages check nothing."""
    try:
        msgspec.convert(msgspec.to_builtins(sampling), Sampling)
    except msgspec.ValidationError as error:
        raise RequestError(_in_our_words(error)) from None
    for name in ("stop", "structured_outputs"):
        try:
            msgspec.msgpack.encode(getattr(sampling, name))
        except UnicodeEncodeError as error:  # half a surrogate pair, which no message can carry
            raise RequestError(f"{name}: expected Unicode text, got {error}; correct it") from None
    if sampling.min_tokens > sampling.max_tokens:
        raise RequestError(
            f"min_tokens={sampling.min_tokens}: expected at most max_tokens={sampling.max_tokens}; "
            "change one of them"
        )
    if sampling.structured_outputs is not None:
        check_structured_outputs(sampling.structured_outputs)


def with_options(base: Sampling, options: Mapping[str, object]) -> Sampling:
    """`base` with some options replaced.

    options: by name, as JSON has them: the keys of `logit_bias` may be texts, and `stop` a single one;
    `response_format` stands for `structured_outputs`.
    Raises `RequestError` for an unknown name, a wrong type and a value out of range.
    """
    options = _with_structured_outputs(options)
    for name in options:
        if name == "n":
            raise RequestError(
                "option n is not supported here, where each request has one answer: ask n times, each time "
                "with another seed"
            )
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            advice = f"did you mean {near[0]}?" if near else f"supported: {', '.join(_FIELDS)}"
            raise RequestError(f"option {shown(name)} is not supported; {advice}")
    if isinstance(stop := options.get("stop"), str):
        options = {**options, "stop": [stop]}
    if options.get("top_k") == -1:  # as vLLM writes it, too
        options = {**options, "top_k": 0}
    try:
        changed = msgspec.convert({**msgspec.to_builtins(base), **options}, Sampling, str_keys=True)
    except msgspec.ValidationError as error:
        raise RequestError(_in_our_words(error)) from None
    check_sampling(changed)
    return changed


def _with_structured_outputs(options: Mapping[str, object]) -> Mapping[str, object]:
    """Both ways to ask for them, in plain types and under one name."""
    if "response_format" in options:
        if options.get("structured_outputs") is not None:
            raise RequestError("response_format and structured_outputs: expected one of them; leave one out")
        asked = plain_response_format(options["response_format"])
    elif options.get("structured_outputs") is not None:
        asked = plain_structured_outputs(options["structured_outputs"])
    else:
        return options
    others = {name: value for name, value in options.items() if name != "response_format"}
    return {**others, "structured_outputs": asked}


def _in_our_words(error: msgspec.ValidationError) -> str:
    """`msgspec` says what it expected `at $.presence_penalty`; the option comes first here."""
    expected, _, place = str(error).partition(" - at ")
    option = place.strip("`").partition("$.")[2] or "options"
    return f"{option}: {expected[:1].lower()}{expected[1:]}"
