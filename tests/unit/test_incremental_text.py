"""Pieces of text add up to the text of all ids at once, for every kind of decoder and every split."""

import random

import pytest

from stages.incremental_text import IncrementalText, TextDecoder
from tests.tiny_tokenizers import byte_fallback, byte_level, metaspace, word_piece

BUILDERS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
}
TEXT = "Hi 🌵, 東京! 👩‍👩‍👧 naïve café\n  two   spaces — ok 🇩🇪 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35"


@pytest.fixture(scope="module", params=BUILDERS)
def tokenizer(request):
    return BUILDERS[request.param]()


def stream(decoder: TextDecoder, blocks: list[list[int]]) -> list[str]:
    decoding = IncrementalText(decoder)
    return [*(decoding.push(block) for block in blocks), decoding.finish()]


def random_blocks(ids: list[int], rng: random.Random, longest: int) -> list[list[int]]:
    blocks = []
    while ids:
        size = rng.randint(1, longest)
        blocks.append(ids[:size])
        ids = ids[size:]
    return blocks


def test_pieces_of_random_ids_add_up_to_the_one_shot_text(tokenizer):
    decoder, rng = TextDecoder(tokenizer), random.Random(5)
    vocabulary_size = tokenizer.get_vocab_size() + 3  # and a few ids of padded rows
    for _ in range(400):
        ids = [rng.randrange(vocabulary_size) for _ in range(rng.randint(0, 40))]
        expected = tokenizer.decode(ids, skip_special_tokens=True)
        pieces = stream(decoder, random_blocks(ids, rng, longest=rng.choice([1, 2, 8])))
        assert "".join(pieces) == expected


def test_pieces_of_bytes_and_spaces_add_up_to_the_one_shot_text(tokenizer):
    """Ids drawn from the tokens that are hard: single bytes, lone spaces, U+FFFD and a few words."""
    decoder, rng = TextDecoder(tokenizer), random.Random(6)
    vocabulary = tokenizer.get_vocab()
    is_hard = lambda token: token.startswith(("<0xE", "<0xB", "<0x8", "▁", "\ufffd", "##")) or len(token) == 1  # noqa: E731
    hard = sorted(token_id for token, token_id in vocabulary.items() if is_hard(token))
    for _ in range(400):
        ids = [rng.choice(hard) for _ in range(rng.randint(1, 30))]
        pieces = stream(decoder, random_blocks(ids, rng, longest=3))
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_no_half_character_is_shown_at_any_block_boundary(tokenizer):
    decoder = TextDecoder(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    for cut in range(len(ids) + 1):
        pieces = stream(decoder, [ids[:cut], ids[cut:]])
        assert "".join(pieces) == expected
        if "\ufffd" not in expected:
            assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(stream(decoder, [[token_id] for token_id in ids])) == expected


def test_byte_level_text_survives_the_round_trip_token_by_token():
    tokenizer = byte_level()
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert len(ids) > len(TEXT) // 2
    assert "".join(stream(TextDecoder(tokenizer), [[token_id] for token_id in ids])) == TEXT


def test_complete_characters_are_not_held_back():
    tokenizer = byte_level()
    decoding = IncrementalText(TextDecoder(tokenizer))
    ids = tokenizer.encode("hello 한", add_special_tokens=False).ids
    shown = [decoding.push([token_id]) for token_id in ids]
    assert "".join(shown) == "hello 한"
    assert shown[0]
    assert shown[-1] == "한"


def test_an_incomplete_character_at_the_end_comes_with_finish():
    tokenizer = byte_level()
    decoding = IncrementalText(TextDecoder(tokenizer))
    ids = tokenizer.encode("a🦀", add_special_tokens=False).ids
    assert decoding.push(ids[:-1]) == "a"
    assert decoding.finish() == "\ufffd"
    assert decoding.finish() == ""


def test_special_tokens_have_no_text_and_do_not_eat_the_next_space():
    tokenizer = byte_fallback()
    bos, the, eos = (tokenizer.token_to_id(token) for token in ("<s>", "▁the", "</s>"))
    assert stream(TextDecoder(tokenizer), [[bos], [the], [eos], [the], [eos]]) == [
        "",
        "the",
        "",
        " the",
        "",
        "",
    ]


@pytest.mark.parametrize("kind", ["text", "invalid bytes", "lone spaces"])
def test_the_cost_of_a_piece_does_not_grow_with_the_answer(kind):
    tokenizer = byte_fallback() if kind == "lone spaces" else byte_level()
    if kind == "text":
        ids = tokenizer.encode("hello 🌵 world ", add_special_tokens=False).ids
    elif kind == "invalid bytes":
        ids = tokenizer.encode("한", add_special_tokens=False).ids[:1]
    else:
        ids = [tokenizer.token_to_id("▁")]
    counting = CountingDecoder(tokenizer)
    decoding = IncrementalText(counting)
    longest = []
    for start in range(2):
        counting.longest = 0
        for number in range(300):
            decoding.push([ids[(start + number) % len(ids)]])
        longest.append(counting.longest)
    assert longest[1] <= max(longest[0], 16)
    assert longest[1] <= 16


class CountingDecoder(TextDecoder):
    """Remembers the longest call, which is what a piece costs; a clock would depend on the machine."""

    longest = 0

    def decode(self, token_ids):
        self.longest = max(self.longest, len(token_ids))
        return super().decode(token_ids)


@pytest.mark.demo
def test_demo_text_survives_the_round_trip_token_by_token():
    from stages.model.source import resolve
    from stages.vocabulary import load_tokenizer

    tokenizer = load_tokenizer(resolve(None))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert "".join(stream(TextDecoder(tokenizer), [[token_id] for token_id in ids])) == TEXT
