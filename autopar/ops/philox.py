"""Philox-4x32-10, the counter generator of Random123 (Salmon et al., SC 2011), in torch int64 arithmetic.

    philox(counter: four 32-bit words, key: two 32-bit words)  ->  four random 32-bit words

A word is an int64 tensor with values in [0, 2**32): torch has no unsigned product, and the low 64 bits of a product
are the same for signed numbers. Ten rounds are about 120 elementwise operations, so they run in place on pieces that
stay in the processor's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, as 32-bit fractions
WORD = 0xFFFFFFFF
LANES = 4
_PIECE = 32768  # counters; the ten buffers of 256 KiB stay in a second-level cache (4 M words: 0.07 s of one core)


def philox(counters: Tensor, salt: int, draw: int, seed: Tensor) -> Tensor:
    """The four words of each counter (number low, number high, salt, draw) under the key `seed`.

    counters: int64, shape (n,), the 64-bit numbers. salt, draw: 32-bit words. seed: 0-dim int64 tensor on the same
    device. Returns int64 of shape (n, 4).
    """
    words = torch.empty(counters.numel(), LANES, dtype=torch.int64, device=counters.device)
    key = (seed & WORD, (seed >> 32) & WORD)
    step = _PIECE if counters.device.type == "cpu" else max(counters.numel(), 1)
    for start in range(0, counters.numel(), step):
        number = counters[start : start + step]
        out = words[start : start + step]
        state = (number & WORD, (number >> 32) & WORD, torch.full_like(number, salt), torch.full_like(number, draw))
        torch.stack(_rounds(state, key), dim=1, out=out)
    return words


def philox_words(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 of counters given as four words each; the arguments stay as they are."""
    copies = tuple(word.clone() for word in counter)
    return _rounds((copies[0], copies[1], copies[2], copies[3]), key)


def _rounds(state: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds; the four words are overwritten."""
    first, second, third, fourth = state
    high, other_high = torch.empty_like(first), torch.empty_like(first)
    for turn in range(ROUNDS):
        keys = [(word + turn * step) & WORD for word, step in zip(key, KEY_STEPS, strict=True)]
        first.mul_(MULTIPLIERS[0])
        third.mul_(MULTIPLIERS[1])
        _high_word(first, high).bitwise_xor_(fourth).bitwise_xor_(keys[1])
        _high_word(third, other_high).bitwise_xor_(second).bitwise_xor_(keys[0])
        first.bitwise_and_(WORD)
        third.bitwise_and_(WORD)
        # (high of third, low of third, high of first, low of first); the buffers that held second and fourth are free
        first, second, third, fourth, high, other_high = other_high, third, high, first, second, fourth
    return first, second, third, fourth


def _high_word(product: Tensor, out: Tensor) -> Tensor:
    torch.bitwise_right_shift(product, 32, out=out)
    return out.bitwise_and_(WORD)  # torch shifts the sign in
