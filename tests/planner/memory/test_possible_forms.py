"""Which forms a value may be saved in: what its readers in backward and in forward allow."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import fx, nn

from autopar.capture import capture
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.possible_forms import PossibleForms, added_variance, allowed_forms
from autopar.plans.plan_value import MASK

ALL = allowed_forms("2bit")


class Model(nn.Module):
    """One value of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.gate = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.side, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.side(x) + torch.relu(self.side(x))  # relu#0: its own backward alone reads it
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        x = x + self.down(torch.relu(self.up(x)))  # relu#1: a product, too
        y = torch.tanh(self.side(x))
        x = x + y * self.gate(y).topk(2, -1).values.sum(-1, keepdim=True)
        x = x + nn.functional.dropout(self.side(x).exp(), 0.2)
        return nn.functional.cross_entropy(self.head(x), labels)


@cache
def forms() -> tuple[PossibleForms, dict[str, fx.Node]]:
    program = capture(Model(), (torch.randn(6, 8), torch.zeros(6, dtype=torch.int64)), {})
    lifetimes = Lifetimes(program)
    return PossibleForms(lifetimes), {str(node.meta["operator"]): node for node in lifetimes.in_order}


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("/relu#0", (MASK,)),
        ("/relu#1", ALL),  # with a bit a value for its own backward
        ("/gelu#0", ALL),
        ("up/add#0", ("8bit",)),  # gelu_backward
        ("norm/native_layer_norm#0", ALL),
        ("/tanh#0", ("8bit",)),
        ("gate/add#0", ()),  # routing
        ("/exp#0", ALL),
        ("/dropout#0", (MASK,)),
        ("head/add#0", ()),  # what a loss reads
    ],
)
def test_readers_decide(operator: str, expected: tuple[str, ...]) -> None:
    found, nodes = forms()
    assert found.of(nodes[operator], ALL) == expected


def test_nothing_but_masks_is_there_unless_it_is_allowed() -> None:
    found, nodes = forms()
    assert found.of(nodes["/gelu#0"], allowed_forms(None)) == found.of(nodes["/gelu#0"], allowed_forms("none")) == ()
    assert found.of(nodes["/gelu#0"], allowed_forms("4bit")) == ("8bit", "4bit")
    assert found.of(nodes["/relu#0"], allowed_forms(None)) == (MASK,)


def test_room_is_counted_with_ranges_and_signs() -> None:
    found, nodes = forms()
    assert found.kept_part((nodes["/relu#0"], 0), MASK) == 1 / 32
    assert found.kept_part((nodes["/gelu#0"], 0), "4bit") == pytest.approx((4 + 64 / 256) / 32)
    assert found.kept_part((nodes["/relu#1"], 0), "4bit") == pytest.approx((5 + 64 / 256) / 32)
    assert found.kept_part((nodes["/dropout#0"], 1), MASK) == 1 / 8
    assert found.kept_part((nodes["norm/native_layer_norm#0"], 1), "4bit") == 1.0


def test_what_is_made_again_needs_enough_bits_and_no_choice() -> None:
    found, nodes = forms()
    assert found.serves(nodes["/exp#0"], "8bit", nodes["/dropout#0"])
    assert not found.serves(nodes["/exp#0"], "4bit", nodes["/dropout#0"])
    assert not found.serves(nodes["/tanh#0"], "8bit", nodes["gate/mm#0"])
    assert found.serves(nodes["/tanh#0"], "8bit", nodes["/mul#0"])
    assert not found.serves(nodes["/relu#0"], MASK, nodes["/add#0"])


def test_fewer_bits_add_more_variance() -> None:
    """A sixth of the square of a step, of values in a normal distribution, as tried."""
    x = torch.randn(4000, 256, dtype=torch.float64)
    for bits in (8, 4, 2):
        step = (x.amax(1) - x.amin(1)) / (2**bits - 1)
        fraction = ((x - x.amin(1, keepdim=True)) / step.unsqueeze(1)) % 1
        measured = float((step.square().unsqueeze(1) * fraction * (1 - fraction)).mean())
        assert added_variance(bits) == pytest.approx(measured, rel=0.05)
