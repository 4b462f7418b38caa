"""What a program gives as a prompt, told apart and checked: a text, a conversation, or token ids.

    "Once upon a time"                    {"prompt": "Once upon a time"}
    {"prompt_token_ids": [1, 2, 3]}       [{"role": "user", "content": "Why is the sky blue?"}]

It knows no vocabulary: the ids of a model's tokenizer end where the tokenizer stage says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from conf.limits import MAX_WHOLE_NUMBER
from pipeline.errors import RequestError, shown
from pipeline.messages import ChatTurn

PromptDict = Mapping[str, object]
"""`{"prompt": TEXT}` or `{"prompt_token_ids": IDS}`, as vLLM has them."""
Prompt = str | PromptDict | Sequence[ChatTurn | Mapping[str, str]]
"""A raw prompt, also in a dict and also as token ids; or the turns of a conversation:
`{"role": "user", "content": "..."}`."""

_MOST_BITS = 64
"""Of a number that an error quotes: Python refuses to write very long ones."""

EXPECTED_DICT = '{"prompt": "..."} or {"prompt_token_ids": [1, 2, ...]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPrompt:
    """A prompt as requests carry it. Exactly one of the three is given."""

    prompt: str | None = None
    """Raw text."""
    chat: list[ChatTurn] | None = None
    """Turns for the model's chat template."""
    prompt_token_ids: list[int] | None = None
    """What the model reads, as it stands."""


def prompt_of(given: Prompt) -> GivenPrompt:
    """The prompt that a program means. Raises `RequestError` for what is none."""
    if isinstance(given, str):
        _check_unicode(given)
        return GivenPrompt(prompt=given)
    if isinstance(given, Mapping):
        return _prompt_of_dict(given)
    if not isinstance(given, Sequence):
        raise RequestError(
            f"expected a text, {EXPECTED_DICT}, or a list of turns, got {type(given).__name__}; give one"
        )
    return GivenPrompt(chat=turns_of(cast("Sequence[ChatTurn | Mapping[str, str]]", given)))


def turns_of(chat: Sequence[ChatTurn | Mapping[str, str]]) -> list[ChatTurn]:
    """The turns of a conversation. Raises `RequestError` for what is none."""
    if not isinstance(chat, Sequence):
        raise RequestError(f"expected a list of turns, got {type(chat).__name__}; give one")
    turns = []
    for turn in chat:
        try:
            turns.append(msgspec.convert(turn, ChatTurn))
        except msgspec.ValidationError as error:
            raise RequestError(
                f'expected turns like {{"role": "user", "content": "..."}}, got {shown(turn)}: {error}; '
                'correct it (token ids are given as {"prompt_token_ids": [1, 2, ...]})'
            ) from None
        _check_unicode(turns[-1].role + turns[-1].content)
    return turns


def check_length(token_ids: object, *, max_context: int) -> None:
    """Raise `RequestError` for more token ids than a context holds, whatever else they are."""
    if isinstance(token_ids, Sequence) and len(token_ids) >= max_context:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, but the context holds {max_context} and needs "
            "room for at least one more; shorten the prompt or raise model.max_context"
        )


def check_prompt(
    *, prompt: str | None, chat: Sequence[ChatTurn] | None, prompt_token_ids: object = None
) -> None:
    """Raise `RequestError` unless exactly one of the three is given, and token ids can be some."""
    kinds = {"prompt": prompt, "chat": chat, "prompt_token_ids": prompt_token_ids}
    given = [name for name, value in kinds.items() if value is not None]
    if len(given) != 1:
        came = " and ".join(given) or "none of them; give one"
        advice = "; leave out all but one" if given else ""
        raise RequestError(f"expected exactly one of prompt, chat and prompt_token_ids, got {came}{advice}")
    if prompt_token_ids is not None:
        checked_token_ids(prompt_token_ids)


def checked_token_ids(given: object, *, vocab_size: int | None = None) -> list[int]:
    """Token ids of a prompt as a list, at least one.

    vocab_size: they must be below it; None: it is not known here.
    Raises `RequestError` that names the first that is no token id.
    """
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise RequestError(
            f"prompt_token_ids: expected a list of token ids such as [1, 2, 3], got {type(given).__name__}; "
            "give a list (of an array or a tensor .tolist() makes one)"
        )
    if not given:
        raise RequestError("prompt_token_ids is empty: expected at least one token id; add it")
    largest = MAX_WHOLE_NUMBER if vocab_size is None else vocab_size - 1
    for place, token_id in enumerate(given):
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(
                f"prompt_token_ids[{place}]: expected a whole number, got {shown(repr(token_id))} of type "
                f"{type(token_id).__name__}; correct it"
            )
        if not 0 <= token_id <= largest:
            whose = "a token id" if vocab_size is None else "a token id of the model's tokenizer"
            bits = token_id.bit_length()
            came = token_id if bits <= _MOST_BITS else f"a number of {bits} bits"
            raise RequestError(
                f"prompt_token_ids[{place}]: expected {whose}, 0 to {largest}, got {came}; correct it"
            )
    return list(given)


def _check_unicode(text: str) -> None:
    """Half a surrogate pair is no character, and no message can carry it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not valid Unicode text ({error}); correct it") from None


def _prompt_of_dict(given: PromptDict) -> GivenPrompt:
    match given:
        case {"prompt": str(text), **others} if not others:
            _check_unicode(text)
            return GivenPrompt(prompt=text)
        case {"prompt_token_ids": token_ids, **others} if not others:
            return GivenPrompt(prompt_token_ids=checked_token_ids(token_ids))
        case {"prompt": value, **others} if not others:
            raise RequestError(f"prompt: expected a text, got {type(value).__name__}; correct it")
    keys = ", ".join(str(key) for key in given) or "none"
    raise RequestError(f"expected {EXPECTED_DICT}, with this key alone, got {shown(keys)}; correct the keys")
