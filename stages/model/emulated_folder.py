"""The folder of an emulated model: nothing but a tokenizer, for the stages that read and write text.

The first 256 ids are bytes, so that every prompt can be encoded; the others are made-up words, of which
answers mostly consist.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stages.model.cache_folder import build_once

_VERSION = 1
_ONSETS = ["b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z"]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "au", "ei", "ou"]


def folder_of(vocab_size: str) -> Path:
    """The folder with the tokenizer of an emulated model; made on first use.

    vocab_size: in digits, as a resolver gets its model's name (see `pipeline.model_source`).
    """
    size = int(vocab_size)

    def build(folder: Path) -> None:
        made_tokenizer(size).save(str(folder / "tokenizer.json"))

    return build_once(f"emulated-{size}-v{_VERSION}", build)


def made_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level, without merges; `vocab_size` is at least 256."""
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for number in range(vocab_size - len(vocabulary)):
        vocabulary["Ġ" + _word(number)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word(number: int) -> str:
    """A word of two or more syllables for each number, all different: its digits in base 144."""
    syllables = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]
    word = ""
    for least_left in (1, 0, 0, 0):
        word += syllables[number % len(syllables)]
        number //= len(syllables)
        if number == 0 and not least_left:
            break
    return word
