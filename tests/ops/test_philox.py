"""Philox-4x32-10 is the generator of the paper."""

import pytest
import torch

from autopar.ops import philox as module
from autopar.ops.philox import philox, philox_words

VECTORS = [  # Random123, kat_vectors: philox4x32 10
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    given, pair = words(counter), words(key)
    assert torch.cat(philox_words(given, pair)).tolist() == torch.cat(words(expected)).tolist()
    assert torch.cat(given).tolist() == torch.cat(words(counter)).tolist(), "the arguments stay as they are"


def test_a_counter_is_number_salt_and_draw_under_the_seed() -> None:
    seed, number, salt, draw = -1234567890123, 7 + (5 << 32), (1 << 31) + 3, 2
    key = (torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([(seed >> 32) & 0xFFFFFFFF]))
    expected = philox_words(tuple(torch.tensor([word]) for word in (7, 5, salt, draw)), key)
    found = philox(torch.tensor([number]), salt, draw, torch.tensor(seed))
    assert torch.equal(found[0], torch.cat(expected))


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, seed = torch.arange(100) * 977, torch.tensor(5)
    whole = philox(counters, 3, 0, seed)
    monkeypatch.setattr(module, "_PIECE", 7)
    assert torch.equal(philox(counters, 3, 0, seed), whole)
