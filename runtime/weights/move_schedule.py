"""Move schedule: what ranks tell each other of a state that is to move, and what follows for all of them.

    found = schedule(held, wanted, ranks_per_node=8)       held, wanted: of every rank, name -> block, gathered
    found.part.peak_bytes, found.moved(sent_bytes, seconds, cluster).predicted_seconds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._compat import tree_leaves
from autopar.cost_models.move_seconds import move_seconds
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster, MixedCluster
from autopar.layouts.block_moves import (
    PIECES,
    Move,
    MovingTensor,
    RankMoves,
    in_rounds,
    least_bytes,
    moves_between,
    rank_moves,
)
from autopar.layouts.index_blocks import Block, whole_block
from autopar.plans.plan_value import HOST
from autopar.runtime.parameters import held_runs, local_tensor
from autopar.runtime.process_groups import rank

STAGED_BYTES = 64 << 20
"""Of all messages that a rank sends and receives at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedState:
    """What a move between plans did on this rank. sent_bytes: counted where messages are handed to the transport;
    predicted_bytes: that the schedule says; all_bytes: sent by all ranks, of which none less than least_bytes can do;
    peak_bytes: at most so many more than before were held at a time; predicted_seconds: by the links of the cluster,
    None where its devices are of several kinds."""

    sent_bytes: int
    predicted_bytes: int
    all_bytes: int
    least_bytes: int
    peak_bytes: int
    seconds: float
    predicted_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Of a tensor that moves: global shape, dtype, and the parameter to which it belongs ("" for a buffer)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Who sends what to whom. part: that of this rank."""

    tensors: Mapping[str, MovingTensor]
    moves: tuple[Move, ...]
    part: RankMoves

    def moved(self, sent_bytes: int, seconds: float, cluster: Cluster | None) -> MovedState:
        """What was done by it."""
        priced = None if cluster is None or isinstance(cluster, MixedCluster) else cluster
        in_time = None if priced is None else move_seconds(in_rounds(self.moves, STAGED_BYTES // 2), priced)
        return MovedState(
            sent_bytes=sent_bytes,
            predicted_bytes=self.part.sent_bytes,
            all_bytes=sum(move.nbytes for move in self.moves),
            least_bytes=least_bytes(self.tensors),
            peak_bytes=self.part.peak_bytes,
            seconds=seconds,
            predicted_seconds=in_time,
        )


def schedule(
    held: Sequence[Mapping[str, tuple[Form, Block]]],
    wanted: Sequence[Mapping[str, Block]],
    ranks_per_node: int | None,
    staged_bytes: int = STAGED_BYTES,
) -> Schedule:
    """The same on every rank. held, wanted: of every rank, by name; ranks_per_node: None: all on one.

    Raises ConfigurationError where a rank is to hold what no rank holds."""
    names = dict.fromkeys(name for found in (*held, *wanted) for name in found)
    forms = {name: form for found in held for name, (form, _) in found.items()}
    tensors = {
        name: MovingTensor(
            itemsize=forms[name].dtype.itemsize,
            held={at: found[name][1] for at, found in enumerate(held) if name in found},
            wanted={at: found[name] for at, found in enumerate(wanted) if name in found},
        )
        for name in names
    }
    most = staged_bytes // 2
    moves = tuple(moves_between(tensors, most // PIECES, ranks_per_node))
    return Schedule(tensors=tensors, moves=moves, part=rank_moves(tensors, moves, rank(), most))


def block_held(tensor: torch.Tensor) -> Block:
    """What this rank holds of a tensor, in the order in which it lies there; all of a plain one."""
    if not isinstance(tensor, DTensor):
        return whole_block(tensor.shape)
    dims = [held_runs(tensor, dim) for dim in range(tensor.dim())]
    return tuple(tuple((run.start, run.length) for run in runs) for runs in dims)


_OTHERWISE = "autopar.save, compile under the other plan, and autopar.load"


def check_movable(tensor: torch.Tensor, what: str) -> None:
    """Raises ConfigurationError for a tensor of which no part can be sent by itself."""
    local = local_tensor(tensor)
    partial_sums = isinstance(tensor, DTensor) and any(placed.is_partial() for placed in tensor.placements)
    if partial_sums or type(local) not in (torch.Tensor, nn.Parameter) or local.layout != torch.strided:
        kind = "partial sums" if partial_sums else type(local).__name__
        raise ConfigurationError(f"{what} is kept as {kind}, of which no part can be sent by itself: {_OTHERWISE}")


def check_of_every_rank(value: Any, what: str) -> None:
    """Raises ConfigurationError for a value of an optimizer's state that is no DTensor, and may be of a block: each
    rank is to have one of its own, such as a count of steps."""
    if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
        raise ConfigurationError(f"{what} holds DTensors inside of a {type(value).__name__}: {_OTHERWISE}")
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        raise ConfigurationError(
            f"{what} is a plain tensor of shape {tuple(value.shape)}, which does not say how it lies across ranks: "
            f"make it a DTensor, as torch.zeros_like(parameter) does, or {_OTHERWISE}"
        )


def check_memory(tensor: torch.Tensor, what: str, memory: str, device: torch.device) -> None:
    """Raises ConfigurationError where a tensor that stays the object that it is would go between host and device.

    memory: of `plan_value.MEMORIES`, behind the move; device: of the rank."""
    lies, is_to_lie = local_tensor(tensor).device.type, "cpu" if memory == HOST else device.type
    if lies != is_to_lie:
        raise ConfigurationError(
            f"{what} lies on {lies}, and under the other plan on {is_to_lie} (offload=), where no tensor goes and "
            f"stays the one that it is: {_OTHERWISE}"
        )
