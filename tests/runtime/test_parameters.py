"""Whole tensors of DTensors, and optimizers of them, on one process; `tests/distributed` gathers them over several."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor import Replicate as TorchReplicate

from autopar._compat import StridedShard, lone_device_mesh
from autopar.layouts.placement import Mesh, Replicate
from autopar.plans.plan_value import DEVICE
from autopar.runtime.parameters import full_tensor, rewrite_optimizer
from autopar.runtime.process_groups import ProcessGroups


def test_a_dim_that_two_axes_split_strided_is_summed_from_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, local = lone_device_mesh("cpu", ("dp", "tp", "cp")), torch.arange(8.0).reshape(4, 2)
    summed: list[int] = []
    monkeypatch.setattr(DeviceMesh, "get_group", lambda mesh, axis: axis)
    monkeypatch.setattr(dist, "all_reduce", lambda whole, group: summed.append(group))
    placements = (TorchReplicate(), StridedShard(0, split_factor=2), StridedShard(0, split_factor=2))
    sharded = DTensor.from_local(local, mesh, placements, run_check=False, shape=local.shape, stride=local.stride())
    assert torch.equal(full_tensor(sharded), local)
    assert summed == [0, 1, 2]


def test_names_of_an_optimizer_s_parameters_leave_with_them() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    optimizer = torch.optim.AdamW(list(model.named_parameters()))
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    here, gone = model["c"].weight, model["b"].weight
    new = nn.Parameter(torch.zeros(2, 2))
    groups = ProcessGroups(Mesh(("dp",), (1,)), "cpu")
    rewrite_optimizer(optimizer, {id(here): new}, {id(here): ((Replicate(),), DEVICE)}, groups, {id(gone)})
    (group,) = optimizer.param_groups
    assert [id(each) for each in group["params"]] == [id(model["a"].weight), id(new)]
    assert group["param_names"] == ["a.weight", "c.weight"]
    assert set(optimizer.state) == {model["a"].weight, new}
