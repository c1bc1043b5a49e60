"""Which part of a model is drawn when: every weight once, whatever holds it."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

initialise = import_module("autopar.runtime.weights.initialise")


class Scaled(nn.Module):
    """A container that has a weight of its own beside that of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.scale = nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def test_a_container_with_a_weight_of_its_own_does_not_draw_its_layers_again() -> None:
    with torch.device("meta"):
        model = Scaled()
    drawn: list[tuple[str, ...]] = []

    def shard(parameter: nn.Parameter, names: tuple[str, ...]) -> nn.Parameter:
        drawn.append(tuple(names))
        return nn.Parameter(parameter.detach().clone())

    initialise.initialise(model, shard, torch.device("cpu"), 3)
    assert drawn == [("layer.weight",), ("scale",)]
    torch.manual_seed(3)
    assert torch.equal(model.layer.weight, nn.Linear(2, 2, bias=False).weight), "the first draw of the seed"
    assert torch.equal(model.scale, torch.ones(2))
