"""Repeated blocks are found by what they compute, cuts by what every path passes."""

import torch
from torch import nn

from autopar.capture import capture
from autopar.planner.pipelines.repeated_blocks import Blocks, find_blocks


class Residual(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, hidden: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(16, size) for size in hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def blocks_of(*hidden: int) -> Blocks:
    return find_blocks(capture(Stack(list(hidden)), (torch.randn(4, 16),), {}))


def test_equal_layers_are_one_kind() -> None:
    found = blocks_of(32, 32, 32)
    middle = [kind for kind in found.kinds if "layers.1" in kind]
    assert found.num_blocks == 3
    assert set().union(*map(set, found.kinds)) == {"layers.0", "layers.1", "layers.2"}
    assert len(middle) == 1


def test_a_wider_layer_is_another_kind() -> None:
    assert not any({"layers.1", "layers.2"} <= set(kind) for kind in blocks_of(32, 32, 48, 32).kinds)


def test_sums_of_residuals_are_cuts_and_branches_are_not() -> None:
    cuts = blocks_of(32, 32).cuts
    assert [cut for cut in cuts if cut.startswith("layers.")] == ["layers.0/add#0", "layers.1/add#0"]
    assert not any("up" in cut or "down" in cut for cut in cuts)
