"""Decodes token ids to text piece by piece, so that the pieces add up to the text of all ids at once.

Why this is not `decode(id)` for each id: a character may span tokens, a decoder may drop the space
before the first word, and a run of byte tokens is text only as a whole. So a small window of tokens is
decoded with every piece:

    ... emitted before | anchor | pending |
                         ^ decoded together; the anchor's text is known and cut off

The anchor gives the pending tokens their context (they are not the first word), and the pending tokens
wait until their text can no longer change. Both are short, whatever the length of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""How vocabularies with byte fallback spell a single byte."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_LONGEST_CHARACTER = 4
"""Bytes, hence at most as many tokens, of one character in UTF-8."""


class TextDecoder:
    """A tokenizer seen from its output side: ids to text, without special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_texts = {token.content for token in added.values() if token.special}
        kinds = json.dumps(json.loads(tokenizer.to_str())["decoder"])
        self._has_byte_fallback = '"ByteFallback"' in kinds
        self.is_byte_level = '"ByteLevel"' in kinds
        """Whether every token is a string of bytes, and a character may be cut anywhere."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` as if an answer started with them."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def text_alone(self, token_id: int) -> str:
        """The text of one token by itself, a special one spelled out."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def has_text(self, token_id: int) -> bool:
        """Whether the id is decoded at all: special tokens are not, nor are the ids of padded rows."""
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and token not in self._special_texts

    def is_fallback_byte(self, token_id: int) -> bool:
        """Whether the id is one byte of a run that the decoder takes as a whole: all text, or all U+FFFD."""
        if not self._has_byte_fallback:
            return False
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None


class IncrementalText:
    """The decoding of one answer."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._anchor: list[list[int]] = []
        """The pieces emitted last, as few as have some text when they stand alone."""
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens and return the text that is settled by them, possibly none."""
        self._pending.extend(token_id for token_id in token_ids if self._decoder.has_text(token_id))
        return self._emit(self._num_settled())

    def pending_text(self) -> str:
        """What `finish` would return now; settles nothing."""
        if not self._pending:
            return ""
        known = self._decoder.decode(self._anchor_ids())
        return self._text_after_anchor(len(self._pending))[len(known) :]

    def finish(self) -> str:
        """Return the text that was held back: nothing will complete it any more."""
        return self._emit(len(self._pending))

    def _emit(self, num_tokens: int) -> str:
        """Move the first `num_tokens` pending tokens into the anchor and return their text."""
        if not num_tokens:
            return ""
        known = self._decoder.decode(self._anchor_ids())
        text = self._text_after_anchor(num_tokens)[len(known) :]
        self._anchor.append(self._pending[:num_tokens])
        del self._pending[:num_tokens]
        # An anchor without text, such as a lone space that decoders drop before the first word, would let
        # the decoder drop the space of the next word as well.
        while len(self._anchor) > 1 and self._decoder.decode(self._anchor_ids(start=1)):
            del self._anchor[0]
        return text

    def _num_settled(self) -> int:
        """How many of the pending tokens have a text that no later token can change."""
        num_pending = len(self._pending)
        if self._decoder.is_byte_level and self._text_after_anchor(num_pending).endswith(_REPLACEMENT):
            return self._num_settled_before_replacement()
        while num_pending and self._decoder.is_fallback_byte(self._pending[num_pending - 1]):
            num_pending -= 1
        return num_pending

    def _num_settled_before_replacement(self) -> int:
        """The same when the text ends with U+FFFD: an incomplete character, or bytes that are none at all.

        Everything before a cut is settled if the texts of the two sides add up: then no character spans
        it, and none ever will, because what follows the cut is already there.
        """
        num_pending = len(self._pending)
        whole = self._text_after_anchor(num_pending)
        for num_held in range(1, min(num_pending, _LONGEST_CHARACTER)):
            held = self._decoder.decode(self._pending[-num_held:])
            if self._text_after_anchor(num_pending - num_held) + held == whole:
                return num_pending - num_held
        return 0

    def _text_after_anchor(self, num_tokens: int) -> str:
        """Text of the anchor and of the first `num_tokens` pending tokens."""
        return self._decoder.decode(self._anchor_ids() + self._pending[:num_tokens])

    def _anchor_ids(self, start: int = 0) -> list[int]:
        return [token_id for piece in self._anchor[start:] for token_id in piece]
