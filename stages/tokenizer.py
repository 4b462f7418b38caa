"""The tokenizer stage: prompts and conversations become token ids.

A raw prompt gets the special tokens that the model's tokenizer adds (such as a first BOS); a conversation
goes through the model's chat template, which writes its own. Text that spells a special token, such as
`<|im_end|>`, becomes that token in both, exactly as transformers has it: prompts are trusted. Token ids pass
through as they stand, if the tokenizer has them.

It knows nothing of models and sampling. A grammar that cannot be compiled is refused here, before the target
sees it, and so is a prompt that is longer than the configured context: to encode megabytes of text would keep
other requests waiting, and to send its tokens the target. The model's own limit is for the verifier to say.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec

from conf.schema import RunConfig
from pipeline.errors import ConfigError, RequestError
from pipeline.given_prompt import check_length, check_prompt, checked_token_ids
from pipeline.messages import (
    CancelRequest,
    ChatTurn,
    RequestFailed,
    StageName,
    SubmitRequest,
    TokenizedRequest,
    TokenizerMessage,
)
from pipeline.stage import Outbox, Stage, StageContext
from pipeline.tokenizer_settings import read_tokenizer_settings
from stages.chat_template import ChatTemplate
from stages.grammar import GrammarChecker
from stages.vocabulary import load_tokenizer

_USUAL_TOKEN = 16
"""Characters: texts that are no longer than contexts of such tokens are encoded without a further look."""
_MOST_NORMALISED = 4
"""Characters of a text that a normaliser may make one of, as NFC composes letters and accents."""


class TokenizerStage(Stage):
    """Turns `SubmitRequest` into `TokenizedRequest`, or into `RequestFailed` for the frontend."""

    accepts = TokenizerMessage

    def __init__(self, *, outbox: Outbox, folder: Path, max_context: int) -> None:
        """folder: local folder of the target model. max_context: tokens of prompt and output, at most."""
        self._max_context = max_context
        self._outbox = outbox
        self._folder = folder
        self._grammars = GrammarChecker(folder)
        self._encoder: PromptEncoder | None = None

    def setup(self) -> None:
        self._encoder = PromptEncoder(self._folder)

    def handle(self, message: TokenizerMessage) -> None:
        match message:
            case SubmitRequest():
                self._tokenize(message)
            case CancelRequest():
                self._outbox.send(StageName.VERIFIER, message)

    def close(self) -> None:
        self._encoder = None

    def _tokenize(self, request: SubmitRequest) -> None:
        assert self._encoder is not None, "setup comes before the first message"
        try:
            if request.sampling.structured_outputs is not None:
                # Here, because what is broken must not cost the target's time, where others wait for it.
                self._grammars.check(request.sampling.structured_outputs)
            token_ids, prompt_text = self._encode(self._encoder, request)
        except RequestError as error:
            failure = RequestFailed(request_id=request.request_id, reason=str(error))
            self._outbox.send(StageName.FRONTEND, failure)
            return
        tokenized = TokenizedRequest(
            request_id=request.request_id,
            prompt_token_ids=token_ids,
            sampling=request.sampling,
            submitted_ns=request.submitted_ns,
            prompt_text=prompt_text,
        )
        self._outbox.send(StageName.VERIFIER, tokenized)

    def _encode(self, encoder: PromptEncoder, request: SubmitRequest) -> tuple[list[int], str | None]:
        """The prompt's token ids, and its text where that shall be echoed. Raises `RequestError`."""
        given, has_echo = request.prompt_token_ids, request.sampling.echo
        check_length(given, max_context=self._max_context)
        check_prompt(prompt=request.prompt, chat=request.chat, prompt_token_ids=given)
        if given is not None:
            encoder.check_token_ids(given)
            return given, encoder.decode(given) if has_echo else None
        text = encoder.text_of_request(prompt=request.prompt, chat=request.chat)
        encoder.check_text_length(text, max_context=self._max_context)
        token_ids = encoder.encode_text(text, is_chat=request.chat is not None)
        check_length(token_ids, max_context=self._max_context)
        return token_ids, text if has_echo else None


class PromptEncoder:
    """The tokenizer and the chat template of one model."""

    def __init__(self, folder: Path) -> None:
        """Load both from a local model folder. Raises `ConfigError` if they cannot be read."""
        settings = read_tokenizer_settings(folder)
        self._tokenizer = load_tokenizer(folder)
        self._chat_template = (
            None
            if settings.chat_template is None
            else ChatTemplate(settings.chat_template, settings.special_tokens)
        )

    def check_token_ids(self, token_ids: list[int]) -> None:
        """Raise `RequestError` for ids above the tokenizer's highest one.

        token_ids: at least one, none below 0.
        """
        # The count is known at once; the highest id, above it where ids have gaps, takes a while to find.
        if max(token_ids) >= self._tokenizer.get_vocab_size(with_added_tokens=True):
            checked_token_ids(token_ids, vocab_size=self._vocab_size)

    def check_text_length(self, text: str, *, max_context: int) -> None:
        """Raise `RequestError` for a text that cannot but have more tokens than the context holds."""
        if len(text) <= max_context * _USUAL_TOKEN:
            return  # the longest token takes a while to find
        most = max_context * max(self._longest_token, _USUAL_TOKEN) * _MOST_NORMALISED
        if len(text) > most:
            raise RequestError(
                f"the prompt has {len(text)} characters, but the context holds {max_context} tokens, and the "
                f"longest has {self._longest_token}; shorten the prompt or raise model.max_context"
            )

    def decode(self, token_ids: list[int]) -> str:
        """The text of a prompt's token ids, special tokens spelled out as in the text of a conversation."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def encode_request(self, *, prompt: str | None, chat: list[ChatTurn] | None) -> list[int]:
        """Token ids of a raw prompt or of a conversation, whichever is given; at least one id.

        Raises `RequestError` as the two steps do that it consists of.
        """
        check_prompt(prompt=prompt, chat=chat)
        text = self.text_of_request(prompt=prompt, chat=chat)
        return self.encode_text(text, is_chat=chat is not None)

    def text_of_request(self, *, prompt: str | None, chat: list[ChatTurn] | None) -> str:
        """The text that is encoded: a raw prompt itself, or a conversation in the model's template.

        Raises `RequestError` for an empty prompt, and for a conversation that the model cannot have.
        """
        if chat is not None:
            return self._render(chat)
        if not prompt:
            raise RequestError("the prompt is empty: expected at least one character")
        return prompt

    def encode_text(self, text: str, *, is_chat: bool) -> list[int]:
        """Token ids of such a text; a conversation's template writes its own special tokens.

        Raises `RequestError` if there are none.
        """
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not is_chat).ids
        if not token_ids:
            raise RequestError("the prompt is empty: expected at least one token")
        return token_ids

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=0)

    @cached_property
    def _vocab_size(self) -> int:
        """One more than the tokenizer's highest id."""
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return max(ids.values(), default=-1) + 1

    def _render(self, turns: list[ChatTurn]) -> str:
        if self._chat_template is None:
            raise RequestError("the model has no chat template: expected a plain prompt; set chat=false")
        if not turns or not turns[-1].content:
            raise RequestError("the prompt is empty: expected a conversation that ends with some text")
        return self._chat_template.render(turns)


def build(context: StageContext) -> TokenizerStage:
    """Make the stage from the run's settings; `model.path` is a local folder by now."""
    config = msgspec.msgpack.decode(context.settings, type=RunConfig)
    if config.model.path is None:
        raise ConfigError("model.path: expected the local folder of the resolved model, got none")
    return TokenizerStage(
        outbox=context.outbox, folder=Path(config.model.path), max_context=config.model.max_context
    )
