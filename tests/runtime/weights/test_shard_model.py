"""What becomes of a model's tree on one process; `tests/distributed` shards it over several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import autopar
from autopar.layouts.placement import Replicate, Shard
from autopar.runtime.weights import shard_model


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> autopar.ParallelModule:
    return autopar.compile(
        model, torch.ones(2, 4), loss_fn=lambda output, batch: output.square().mean(), optimizer=optimizer
    )


def test_parameters_are_exchanged_in_place_stay_plain_and_the_optimizer_knows_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    module = compiled(model, optimizer)
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert module.get_parameter("1.weight") is module.get_parameter("0.weight")
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in module.parameters()]
    assert all(optimizer.state[parameter]["exp_avg"].abs().sum() > 0 for parameter in module.parameters())


def test_a_model_on_meta_gets_weights_from_the_seed() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    torch.manual_seed(3)
    module = compiled(model)
    torch.manual_seed(3)
    assert torch.equal(module.get_parameter("weight"), nn.Linear(4, 4).weight)


def test_full_tensors_are_loaded() -> None:
    module, wanted = compiled(nn.Linear(4, 4)), nn.Linear(4, 4).state_dict()
    module.load_state_dict({name: tensor.clone() for name, tensor in wanted.items()})
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, wanted[name])


def test_a_buffer_is_cut_where_any_axis_cuts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Module())
    for name in ("cut", "whole"):
        model[0].register_buffer(name, torch.ones(4))
    monkeypatch.setattr(shard_model, "shard_tensor", lambda tensor, layout, groups: tensor[:2])
    layouts = {"0.cut": (Replicate(), Shard(0)), "0.whole": (Replicate(), Replicate())}
    shard_model._shard_buffers(model, cast(Any, SimpleNamespace(buffers=layouts)), cast(Any, None))
    assert {name: len(buffer) for name, buffer in model.named_buffers()} == {"0.cut": 2, "0.whole": 4}
