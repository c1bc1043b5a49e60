"""Which part of a model is drawn when: every weight once, whatever holds it."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import nn

from autopar.errors import ConfigurationError

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


class Table(nn.Module):
    """Weights and a table that no file has, which `reset_parameters` computes, or leaves alone."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.computed = computed
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.computed:
            self.table.copy_(torch.arange(3.0))


def on_meta(computed: bool) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(Table(computed))


def test_buffers_are_computed_where_weights_come_from_files() -> None:
    model = on_meta(computed=True)
    initialise.fill_buffers(model, torch.device("cpu"), ())
    assert torch.equal(model[0].table, torch.arange(3.0))
    assert model[0].weight.is_meta, "no weight is drawn"


def test_a_buffer_that_files_have_is_left_to_them() -> None:
    model = on_meta(computed=False)
    initialise.fill_buffers(model, torch.device("cpu"), {"0.table"})
    assert model[0].table.is_meta


def test_a_buffer_that_nobody_computes_is_refused() -> None:
    """It was zeros without a word."""
    words = r"buffer table of 0 \(Table\) is on the meta device, which keeps no values"
    with pytest.raises(ConfigurationError, match=words):
        initialise.fill_buffers(on_meta(computed=False), torch.device("cpu"), ())
    with pytest.raises(ConfigurationError, match=words):
        initialise.initialise(on_meta(computed=False), lambda parameter, _: parameter, torch.device("cpu"), 0)


def test_each_model_inside_computes_its_own_buffers() -> None:
    """As transformers does; the outer model knows nothing of the tables of the inner one."""

    class Inner(Table):
        def _init_weights(self, module: nn.Module) -> None:
            module.table.copy_(torch.full((3,), 5.0))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(computed=False)

        def _init_weights(self, module: nn.Module) -> None: ...

    with torch.device("meta"):
        model = Outer()
    initialise.fill_buffers(model, torch.device("cpu"), ())
    assert torch.equal(model.inner.table, torch.full((3,), 5.0))
