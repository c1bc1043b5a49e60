"""Causal attention of one sequence that several GPUs share, forward: heads by Ulysses, blocks around a ring, or both.

    batch, seq_len, heads, head_dim, ulysses_degree, group_num  ->  dims={"cp": 8 / ulysses, "cp_inner": ulysses}

A row is planned by the planner, under the ways and axes of its own: a module that is nothing but attention of given
queries, keys and values. What the played step takes is the prediction; the host's loop, which bounds short sequences,
is not in it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.hardware.device_curves import DeviceCurves, device_curves, physics_curves, shared_curves
from autopar.hardware.devices import preset_device
from autopar.request.axis_ways import ContextParallelism
from benchmarks.validation.fields import Row, Unpredictable
from benchmarks.validation.rows_attention import GPU, RANKS, Shared, shared_of
from benchmarks.validation.schemas import Predicted, Schema, Tier


def predict(rows: Sequence[Row], schema: Schema, tier: Tier) -> list[Predicted]:
    """Calls per second of every row."""
    return [_predicted(row, schema, tier) for row in rows]


def _predicted(row: Row, schema: Schema, tier: Tier) -> Predicted:
    try:
        seconds = seconds_of(shared_of(row), tier)
    except (ConfigurationError, Unpredictable) as error:
        return Predicted(reason=str(error))
    return Predicted(values=dict.fromkeys(schema.measured["attention"], 1 / seconds))


@functools.lru_cache(maxsize=256)
def seconds_of(asked: Shared, tier: Tier) -> float:
    """The played step of a plan that has nothing but this attention."""
    cluster = Cluster.parse(f"{RANKS} {GPU}")
    cluster = replace(cluster, device=replace(cluster.device, curves=_curves(tier)))
    dims = {"cp": RANKS // asked.ulysses, "cp_inner": asked.ulysses}
    way: ContextParallelism = "ulysses" if asked.ulysses == RANKS else "ring"
    heads = {"*/attention#0": {"cp_inner": "S(1)"}}  # else a ring over both axes is a choice, too
    if 1 in dims.values():
        dims, heads = {"cp": RANKS}, {}
    query = torch.empty(asked.batch, asked.heads, asked.tokens, asked.width, dtype=torch.bfloat16)
    key = query[:, : asked.key_heads]
    inputs = {"query": query, "key": key.clone(), "value": key.clone()}
    plan = autopar.plan(_Attention(), inputs, cluster=cluster, dims=dims, cp=way, constraints=heads, mode="fast")
    return plan.predicted.step_seconds


def _curves(tier: Tier) -> DeviceCurves:
    if tier == "physics":
        return physics_curves(GPU, preset_device(GPU).launch_seconds)
    return shared_curves(GPU) if tier == "t0" else device_curves(GPU)


class _Attention(nn.Module):
    """Its loss reads the result once, its only parameter is a number: no backward of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.sum() * self.factor
