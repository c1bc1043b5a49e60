"""The module of an operator: the one that ran it; of a cast outside any module that of what it casts."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.passes.tidy.operator_paths import module_path

OUTSIDE = {"model": ("Step", object)}
"""The stack of what runs in the wrapper around model and loss."""


def cast_of(parameter: str, stack: object) -> fx.Node:
    """A call that casts a parameter, with this stack of modules."""
    graph = fx.Graph()
    weight = graph.placeholder("weight")
    weight.meta["operator"] = parameter
    cast = graph.call_function(torch.ops.aten._to_copy.default, (weight,), {"dtype": torch.bfloat16})
    cast.meta["nn_module_stack"] = stack
    return cast


@pytest.mark.parametrize("parameter", ["layers.0.proj.weight", "head.bias"])
def test_a_cast_of_a_parameter_outside_any_module_belongs_to_the_module_of_the_parameter(parameter: str) -> None:
    assert module_path(cast_of(parameter, OUTSIDE)) == parameter.rpartition(".")[0]


def test_a_cast_inside_a_module_belongs_to_it() -> None:
    inside = {**OUTSIDE, "norm": ("Step.layers.1.norm", object)}
    assert module_path(cast_of("layers.0.proj.weight", inside)) == "layers.1.norm"
