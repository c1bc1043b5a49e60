"""Whole tensors of DTensors, on one process; `tests/distributed` gathers them over several."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor import Replicate as TorchReplicate

from autopar._compat import StridedShard, lone_device_mesh
from autopar.runtime.parameters import full_tensor


def test_a_dim_that_two_axes_split_strided_is_summed_from_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, local = lone_device_mesh("cpu", ("dp", "tp", "cp")), torch.arange(8.0).reshape(4, 2)
    summed: list[int] = []
    monkeypatch.setattr(DeviceMesh, "get_group", lambda mesh, axis: axis)
    monkeypatch.setattr(dist, "all_reduce", lambda whole, group: summed.append(group))
    placements = (TorchReplicate(), StridedShard(0, split_factor=2), StridedShard(0, split_factor=2))
    sharded = DTensor.from_local(local, mesh, placements, run_check=False, shape=local.shape, stride=local.stride())
    assert torch.equal(full_tensor(sharded), local)
    assert summed == [0, 1, 2]
