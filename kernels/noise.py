"""Counter-based Gumbel noise: a pure function of (request seed, absolute position, token id).

Target and draft call it apart and get the same numbers, so coupled verification needs no communication,
and no random state exists anywhere. The hash is integer arithmetic on 64-bit words (the SplitMix64
finaliser, Steele et al. 2014, applied to a keyed counter), so its bits are equal on every device; only
the two logarithms after it are floating point.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB
_UNIFORM_BITS = 52
"""u = (bits + 0.5) / 2**52 needs 53 significant bits, all that float64 has: u is exact, and inside (0, 1)."""


class Stream(IntEnum):
    """Noise that must be independent of all other noise of the same request, under the rejection rule."""

    PROPOSAL = 1
    """What the draft draws."""
    ACCEPTANCE = 2
    """Whether a drawn token is accepted."""
    BONUS = 3
    """The target's own token, where the last try was rejected or none was left."""


def _signed(word: int) -> int:
    """The int64 with the same bits as the unsigned 64-bit `word`."""
    return word - (1 << 64) if word >> 63 else word


def _mix_int(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MUL1) & _MASK64
    word = ((word ^ (word >> 27)) * _MUL2) & _MASK64
    return word ^ (word >> 31)


def _xor_shifted_(words: Tensor, bits: int) -> Tensor:
    """words ^= words >>> bits, in place. int64 shifts copy the sign bit, so it is masked off."""
    return words.bitwise_xor_((words >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _mix_(words: Tensor) -> Tensor:
    """SplitMix64 finaliser on int64 words, in place; the twin of `_mix_int`."""
    _xor_shifted_(words, 30).mul_(_signed(_MUL1))
    _xor_shifted_(words, 27).mul_(_signed(_MUL2))
    return _xor_shifted_(words, 31)


def stream_key(seed: int, position: int) -> int:
    """Key of the noise stream of one position of one request, as an unsigned 64-bit integer.

    Two rounds of mixing keep the streams of neighbouring seeds and positions apart.
    """
    return _mix_int((_mix_int((seed + _GOLDEN) & _MASK64) + position * _GOLDEN) & _MASK64)


def stream_seed(seed: int, stream: Stream) -> int:
    """A seed for one kind of noise of a request, unrelated to the request's other noise.

    seed: 0 <= seed < 2**63, as is the result.
    """
    return _mix_int(_mix_int((seed + _GOLDEN) & _MASK64) ^ ((stream * _MUL1) & _MASK64)) >> 1


def extend_key(key: int, token_id: int) -> int:
    """Key of a context that is one token longer; equal contexts have equal keys, others all but never."""
    return _mix_int((_mix_int(key) + (token_id + 1) * _GOLDEN) & _MASK64)


def uniform(seed: int, position: int, token_id: int) -> float:
    """One uniform strictly inside (0, 1): the twin of `uniform_from_words(hash_words(...))` for one number.

    position: absolute position, or any other 64-bit key. token_id: or any other small number.
    """
    word = _mix_int(((token_id + 1) * _GOLDEN + stream_key(seed, position)) & _MASK64)
    return float(((word >> (64 - _UNIFORM_BITS)) + 0.5) * 2.0**-_UNIFORM_BITS)


def hash_words(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """64 hashed bits for each token id.

    token_ids: any shape, int64. Returns int64 of the same shape; read it as unsigned words.
    """
    words = (token_ids + 1).mul_(_signed(_GOLDEN)).add_(_signed(stream_key(seed, position)))
    return _mix_(words)


def uniform_from_words(words: Tensor) -> Tensor:
    """Uniforms strictly inside (0, 1) from hashed words, float64; `words` is consumed."""
    bits = (words >> (64 - _UNIFORM_BITS)).bitwise_and_((1 << _UNIFORM_BITS) - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-_UNIFORM_BITS)


def gumbel_noise(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise g = -log(-log u) for choosing the token at `position`.

    seed:      0 <= seed < 2**63.
    position:  absolute index of the token to be chosen, the first prompt token being 0.
    token_ids: [N] int64, ids of the *target's* vocabulary, so that a draft with fewer rows draws the
               same noise for the same token.
    Returns [N] float64, finite.
    """
    return uniform_from_words(hash_words(seed, position, token_ids)).log_().neg_().log_().neg_()


def gumbel_noise_for_seeds(seeds: Tensor, position: int, token_ids: Tensor) -> Tensor:
    """`gumbel_noise` for many seeds at once, for statistical tests.

    seeds: [S] int64 (non-negative). token_ids: [N] int64. Returns [S, N] float64.
    """
    return uniforms_for_seeds(seeds, position, token_ids).log_().neg_().log_().neg_()


def uniforms_for_seeds(seeds: Tensor, position: int, token_ids: Tensor) -> Tensor:
    """`uniform` for many seeds at once, for statistical tests: [S, N] float64."""
    keys = _mix_(_mix_(seeds + _signed(_GOLDEN)).add_(_signed((position * _GOLDEN) & _MASK64)))
    words = (token_ids + 1).mul_(_signed(_GOLDEN)).unsqueeze(0) + keys.unsqueeze(1)
    return uniform_from_words(_mix_(words))
