"""Jobs of the workers that write and read checkpoints."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import autopar
from autopar.layouts.placement import Layout, Mesh, Replicate, Shard
from autopar.runtime.checkpoints.training_state import flat_state
from autopar.runtime.guards.strided_chunks import checkpoint_strided_blocks
from autopar.runtime.parameters import full_tensor, local_tensor, shard_tensor
from autopar.runtime.process_groups import ProcessGroups
from tests.distributed.captured_once import compile_once, prepared_by
from tests.distributed.models import captured_tied, tied_model, tokens
from tests.distributed.weight_jobs import BATCH, captured_fused, fused


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


@prepared_by(captured_tied)
def resumed(path: str, dims: dict[str, int], dropout: float) -> bool:
    """Whether six steps give the losses and the weights of three, a save, a load elsewhere and three, bit by bit."""
    module, optimizer, scheduler = _run(11, dims, dropout)
    for step in range(3):
        _step(module, optimizer, step)
        scheduler.step()
    autopar.save(path, module, optimizer, extra={"scheduler": scheduler, "position": 3}, keep_last=1)
    other, again, schedule = _run(5, dims, dropout)
    loaded = autopar.load(path, other, again, extra={"scheduler": schedule})
    losses = []
    for run in ((module, optimizer, scheduler), (other, again, schedule)):
        losses.append([])
        for step in range(loaded.extra["position"], 6):
            losses[-1].append(_step(run[0], run[1], step))
            run[2].step()
    return losses[0] == losses[1] and _bits(module, optimizer) == _bits(other, again)


def _run(seed: int, dims: dict[str, int], dropout: float) -> tuple[autopar.ParallelModule, Any, Any]:
    torch.manual_seed(seed)
    module = compile_once("tied model", tied_model(seed=seed, dropout=dropout), tokens(0), dims=dims)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    return module, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)


def _bits(module: autopar.ParallelModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = flat_state(module, optimizer)
    return {n: local_tensor(v).numpy().tobytes() if isinstance(v, torch.Tensor) else v for n, v in state.items()}


@prepared_by(captured_tied)
def refused(path: str, dims: dict[str, int]) -> list[str]:
    """What this rank hears of a value that differs by rank, a disk that is full on rank 1, a file that was changed, a
    state that rank 1 refuses, and an optimizer of another class; whether all of it changed nothing, and what is there
    is whole."""
    module, optimizer, _ = _run(11, dims, 0.0)
    autopar.save(path, module, optimizer, extra={"guard": _Guard(-1)})
    before = _bits(module, optimizer)
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    heard = [
        _heard(lambda: autopar.save(path, module, extra={"rank": dist.get_rank()})),
        _heard(lambda: _saved_on_a_full_disk(path, module, optimizer)),
        _heard(lambda: autopar.load(path, module, optimizer, extra={"guard": _Guard(1)})),
        _heard(lambda: autopar.load(path, module, other)),
        "" if autopar.load(path, module, optimizer).left_out else "whole",
    ]
    dist.barrier()
    if dist.get_rank() == 0:
        tensors = max(Path(path).rglob("*.distcp"), key=lambda file: file.stat().st_size)
        tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    dist.barrier()
    heard.append(_heard(lambda: autopar.load(path, module, optimizer)))
    return [*heard, "unchanged" if _bits(module, optimizer) == before else "changed"]


class _Guard:
    """Takes its state on all ranks but one."""

    def __init__(self, refuses: int) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == self.refuses:
            raise ValueError("not this one")


def _heard(action: Callable[[], object]) -> str:
    try:
        action()
    except (autopar.AutoparError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _saved_on_a_full_disk(path: str, module: autopar.ParallelModule, optimizer: torch.optim.Optimizer) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        autopar.save(path, module, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def strided_round_trip(path: str) -> float:
    """Save a tensor in strided layouts, load it into another layout and its own; the largest difference."""
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
    checkpoint_strided_blocks()
    full = torch.arange(4.0 * 24).reshape(4, 24)
    worst = 0.0
    for layout in layouts:
        strided = shard_tensor(full, layout, groups)
        worst = max(worst, float((full_tensor(strided) - full).abs().max()))
        dcp.save({"w": strided}, checkpoint_id=path)
        loaded = shard_tensor(torch.zeros_like(full), other, groups)
        dcp.load({"w": loaded}, checkpoint_id=path)
        worst = max(worst, float((loaded.full_tensor() - full).abs().max()))
        back = shard_tensor(torch.zeros_like(full), layout, groups)
        dcp.load({"w": back}, checkpoint_id=path)
        worst = max(worst, float((local_tensor(back) - local_tensor(strided)).abs().max()))
    return worst


def _fully_sharded(seed: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The fused model as FSDP2 of torch has it."""
    model = fused(seed)
    fully_shard(model.fused)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=rate)


def _planned(seed: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = compile_once("fused", fused(seed), BATCH, dims={"tp": 2})
    assert any("split" in str(layout) for layout in module.plan.placements.values())
    return module, torch.optim.AdamW(module.parameters(), lr=rate)


def _trained(module: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """The loss of the second of two steps."""
    for _ in range(2):
        loss = module(*BATCH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def _torchtitan_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As torchtitan's checkpointer has it: weights by their names, the optimizer's state in flat names."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    return {**get_model_state_dict(module), "optimizer": get_optimizer_state_dict(module, optimizer, options=flat)}


def _take_torchtitan_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(module, optimizer, state.pop("optimizer"), options=flat)
    set_model_state_dict(module, state)


def _nested_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As torch's recipe has it."""
    model, optim = get_state_dict(module, optimizer)
    return {"model": model, "optim": optim}


def _take_nested_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


FORMS = {"nested": (_nested_state, _take_nested_state), "torchtitan": (_torchtitan_state, _take_torchtitan_state)}
RUNS = {"fsdp2": _fully_sharded, "autopar": _planned}


@prepared_by(captured_fused)
def carried_over(path: str, writer: str, reader: str, form: str) -> tuple[float, float]:
    """Largest difference of weights, buffers, optimizer state and rates between a run and one of another kind: before
    and after that one took the DCP checkpoint of the first. It trains on then."""
    read, take = FORMS[form]
    module, optimizer = RUNS[writer](3, 0.05)
    _trained(module, optimizer)
    written = _numbers(module, optimizer)
    dcp.save(read(module, optimizer), checkpoint_id=path)
    other, again = RUNS[reader](8, 0.5)
    _trained(other, again)
    before = _difference(written, _numbers(other, again))
    state = read(other, again)
    dcp.load(state, checkpoint_id=path)
    take(other, again, state)
    after = _difference(written, _numbers(other, again))
    assert math.isfinite(_trained(other, again))
    return before, after


def _difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def _numbers(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole tensors and rates, copied, by their names."""
    state = _torchtitan_state(module, optimizer)
    optim = state.pop("optimizer")
    named = {**state, **{f"optimizer.{name}": value for name, value in optim.items()}}
    tensors = {name: torch.as_tensor(value) for name, value in named.items() if isinstance(value, torch.Tensor | float)}
    return {name: full_tensor(value.detach()).clone() for name, value in tensors.items()}


class Loader:
    """Rows of a dataset for one part of the batch; its position is its state."""

    def __init__(self, part: int) -> None:
        self.state = {"part": part, "position": 0}

    def state_dict(self) -> dict[str, int]:
        """The state."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the state."""
        self.state = dict(state)


@prepared_by(captured_fused)
def loaders(path: str) -> tuple[dict[str, int], str]:
    """The state of this rank's loader once it was saved and loaded, and what a run with one part hears of it."""
    module = compile_once("fused", fused(3), BATCH, dims={"dp_shard": 2})
    saved = Loader(module.data_shard()[0])
    saved.state["position"] = 4 + dist.get_rank()
    autopar.save(path, module, extra={"loader": autopar.PerDataRank(saved)})
    loaded = Loader(-1)
    autopar.load(path, module, extra={"loader": autopar.PerDataRank(loaded)})
    whole = compile_once("fused", fused(3), BATCH, dims={"tp": 2})
    return loaded.state, _heard(lambda: autopar.load(path, whole, extra={"loader": autopar.PerDataRank(loaded)}))
