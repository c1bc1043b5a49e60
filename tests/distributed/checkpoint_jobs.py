"""Jobs of the workers that write and read checkpoints."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp

import autopar
from autopar.layouts.placement import Layout, Mesh, Replicate, Shard
from autopar.runtime.checkpoints.tensor_files import in_plain_blocks
from autopar.runtime.parameters import full_tensor, shard_tensor
from autopar.runtime.process_groups import ProcessGroups
from tests.distributed.captured_once import compile_once, prepared_by
from tests.distributed.models import captured_tied, tied_model, tokens


def _step(module: autopar.ParallelModule, optimizer: torch.optim.Optimizer, seed: int) -> float:
    loss = module(**tokens(seed))["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@prepared_by(captured_tied)
def save(path: str, dims: dict[str, int] | None, dropout: float = 0.0) -> list[float]:
    """Train two steps, save, and return the losses of the next two."""
    torch.manual_seed(11)
    module = compile_once("tied model", tied_model(dropout=dropout), tokens(0), dims=dims)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for step in range(2):
        _step(module, optimizer, step)
    autopar.save(path, module, optimizer)
    return [_step(module, optimizer, step) for step in range(2, 4)]


@prepared_by(captured_tied)
def load(path: str, dims: dict[str, int] | None, dropout: float = 0.0) -> list[float]:
    """Load into a module with other weights and another plan, and return the losses of the next two steps."""
    module = compile_once("tied model", tied_model(seed=99, dropout=dropout), tokens(0), dims=dims)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    autopar.load(path, module, optimizer)
    return [_step(module, optimizer, step) for step in range(2, 4)]


def strided_round_trip(path: str) -> float:
    """Save a tensor in strided layouts, load it into another layout; the largest difference of the full tensors."""
    layouts: list[Layout] = [
        (Shard(0), Shard(1, split=3)),
        (Replicate(), Shard(1, split=3)),
        (Shard(1, split=3), Shard(1, split=3)),
        (Shard(1, split=2), Shard(1)),
        (Shard(1), Shard(1, split=6)),
    ]
    return _round_trips(Mesh(("dp_shard", "tp"), (2, 2)), layouts, (Replicate(), Shard(0)), path)


def strided_round_trip_on_three_axes(path: str) -> float:
    """The same on (2, 2, 2)."""
    layouts: list[Layout] = [
        (Shard(0), Replicate(), Shard(1, split=3)),
        (Shard(0), Shard(0), Shard(1)),
        (Shard(1, split=3), Shard(0), Shard(1, split=3)),
        (Shard(1, split=4), Shard(1, split=2), Shard(1)),
        (Shard(1), Shard(0), Shard(1, split=6)),
    ]
    mesh = Mesh(("dp_replicate", "dp_shard", "tp"), (2, 2, 2))
    return _round_trips(mesh, layouts, (Shard(1), Replicate(), Shard(0)), path)


def _round_trips(mesh: Mesh, layouts: list[Layout], other: Layout, path: str) -> float:
    groups = ProcessGroups(mesh, "cpu")
    full = torch.arange(4.0 * 24).reshape(4, 24)
    worst = 0.0
    for layout in layouts:
        strided = shard_tensor(full, layout, groups)
        worst = max(worst, float((full_tensor(strided) - full).abs().max()))
        dcp.save(in_plain_blocks({"w": strided}), checkpoint_id=path)
        loaded = shard_tensor(torch.zeros_like(full), other, groups)
        dcp.load({"w": loaded}, checkpoint_id=path)
        worst = max(worst, float((loaded.full_tensor() - full).abs().max()))
    return worst
