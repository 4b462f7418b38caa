"""Where a stop string is complete, token by token, in vocabularies of every kind."""

import pytest

from stages.incremental_text import TextDecoder
from stages.target_verifier.stop_text import StopMatch, StopText
from tests.tiny_tokenizers import byte_fallback, byte_level, metaspace

TEXT = "hello world the 京 café naïve hello"


def first_match(tokenizer, ids, stop, *, block_size, min_tokens=0):
    """(tokens kept, stop string, characters cut), or None."""
    watch = StopText(TextDecoder(tokenizer), stop, min_tokens=min_tokens)
    for start in range(0, len(ids), block_size):
        match = watch.push(ids[start : start + block_size])
        if match is not None:
            return start + match.index + 1, match.stop, match.num_cut_characters
    return None


def expected(tokenizer, ids, stop, *, min_tokens=0):
    """The same from decoding all ids anew after every token."""
    num_free = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        if count <= min_tokens:
            num_free = len(text)
            continue
        starts = {s: text.find(s, max(num_free - len(s) + 1, 0)) for s in stop}
        found = sorted((start, -len(s), s) for s, start in starts.items() if start >= 0)
        if found:
            start, _, first = found[0]
            return count, first, len(text) - start
    return None


STOPS = [
    ["l"],
    ["world"],
    ["o w"],
    ["京"],
    ["é n"],
    ["hello"],
    ["zzz"],
    ["lo w", "lo"],
    ["lo", "lo w"],
    ["ïve h"],
]


@pytest.mark.parametrize("min_tokens", [0, 4, 9])
@pytest.mark.parametrize("block_size", [1, 3, 100])
@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
def test_a_stop_string_ends_at_the_token_that_completes_it(make, stop, block_size, min_tokens):
    tokenizer = make()
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    found = first_match(tokenizer, ids, stop, block_size=block_size, min_tokens=min_tokens)
    assert found == expected(tokenizer, ids, stop, min_tokens=min_tokens)


def test_a_byte_that_ends_the_stop_string_counts_at_once():
    """A run of byte tokens is settled by what follows it, which must not be waited for."""
    tokenizer = byte_fallback()
    ids = tokenizer.encode("ab!", add_special_tokens=False).ids
    watch = StopText(TextDecoder(tokenizer), ["!"], min_tokens=0)
    assert watch.push(ids) == StopMatch(index=len(ids) - 1, stop="!", num_cut_characters=1)
