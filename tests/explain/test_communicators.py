"""The groups of a rank are those that the runtime makes for it."""

from __future__ import annotations

import torch
from torch import fx, nn

import autopar
from autopar.cost_models.usable_memory import communicator_bytes
from autopar.explain.communicators import communicator_ranks


class Layers(nn.Module):
    """forward(x (B, 256)) -> a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def _plan(cluster: str, dims: dict[str, int]) -> autopar.Plan:
    return autopar.plan(Layers(), {"x": torch.zeros(64, 256)}, cluster=cluster, dims=dims, mode="fast",
        with_baselines=False)


def test_the_default_group_every_axis_and_every_joined_group_are_counted() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for symbol in ("tp", "dp_shard+tp", "dp_shard+tp"):
        graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", symbol))
    plan = _plan("8 H100-SXM", {"dp_shard": 4, "tp": 2})
    assert communicator_ranks(plan, 0, [fx.GraphModule({}, graph)]) == (8, 4, 2)  # what spans all ranks is the default
    assert communicator_ranks(plan, 0, []) == (8, 4, 2)
    assert communicator_ranks(_plan("8 H100-SXM", {"dp_shard": 8}), 0, []) == (8,)


def test_a_table_of_memory_says_what_they_hold() -> None:
    table, sizes = _plan("8 H100-SXM", {"dp_shard": 4, "tp": 2}).memory(), [8, 4, 2]
    assert table.communicators == len(sizes)
    assert table.communicator_bytes == sum(communicator_bytes(size, "cuda") for size in sizes)
    assert f"of NCCL's, not measured here (process groups: {len(sizes)})" in str(table)


def test_stages_have_a_group_across_them() -> None:
    plan = _plan("8 H100-SXM", {"pp": 2, "tp": 4})
    assert communicator_ranks(plan, 1, []) == (8, 4, 2)


def test_one_device_and_cpus_have_none() -> None:
    assert "NCCL" not in str(_plan("1 H100-SXM", {"dp_shard": 1}).memory())
    assert _plan("2 cpu", {"dp_shard": 2}).memory().communicators == 0
