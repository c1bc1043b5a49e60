"""The parts of a batch: which samples a micro-batch takes of every argument, and how the outputs are joined again.

Where ranks share the samples, micro-batch i takes the i-th piece of the samples of every rank, so that a rank needs
nothing of another's:

    batch 0..7 on 2 ranks, 2 micro-batches     rank 0: (0 1) (2 3)     rank 1: (4 5) (6 7)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Replicate, Shard
from autopar.ops.folded_sums import folded_sum
from autopar.plans.parallel_plan import Plan
from autopar.program import Joined, MicroProgram, Output
from autopar.runtime.parameters import from_local, local_block, to_torch
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.batches import input_leaves, output_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParts:
    """The batch of `micro` under the layouts of `plan` on the mesh of `groups`.

    axes: the mesh axes over which the ranks share the samples.
    """

    micro: MicroProgram
    plan: Plan
    groups: ProcessGroups

    def join(self, output: Output, values: list[torch.Tensor], axes: Sequence[int]) -> torch.Tensor:
        """The local block of an output of the whole batch, from those of the parts."""
        joined: Joined = self.micro.joined[output.name]
        if joined.dim is not None:
            return self._concatenated(output.name, joined.dim, values, axes)
        if joined.scale is None:
            return values[0].clone()
        return scaled(folded_sum(torch.stack(values)), joined.scale)

    def _concatenated(self, name: str, dim: int, values: list[torch.Tensor], axes: Sequence[int]) -> torch.Tensor:
        layout = output_layout(self.plan, name)
        pieces = self.pieces(axes)
        split = tuple(axis for axis, placement in enumerate(layout) if placement == Shard(dim))
        if split == tuple(axes) and pieces > 1:
            return torch.cat(values, dim)
        gathered = tuple(Replicate() if placement == Shard(dim) else placement for placement in layout)
        if split:
            values = [self._gathered(name, value, gathered) for value in values]
        whole = _in_order(torch.cat(values, dim), dim, self.micro.count, pieces)
        if not split:
            return whole
        only = tuple(placement if placement == Shard(dim) else Replicate() for placement in layout)
        return local_block(whole, only, self.groups.mesh, self.groups.place).contiguous()

    def _gathered(self, name: str, value: torch.Tensor, layout: Any) -> torch.Tensor:
        index = next(i for i, output in enumerate(self.micro.program.outputs) if output.name == name)
        shape = self.micro.program.returned[index].meta["val"].shape
        tensor = from_local(value, shape, output_layout(self.plan, name), self.groups)
        return tensor.redistribute(placements=to_torch(layout, self.groups.mesh)).to_local()

    # inputs of a part

    def pieces(self, axes: Sequence[int]) -> int:
        """Into how many parts the axes split the batch, where every micro-batch takes a piece of each; else 1."""
        parts = math.prod(self.plan.layout_mesh.shape[axis] for axis in axes)
        sizes = [
            e.shape[e.batch_dim] for e in self.micro.program.inputs if e.role == "input" and e.batch_dim is not None
        ]
        return parts if all(size % parts == 0 for size in sizes) else 1

    def split(self, axes: Sequence[int], local: bool) -> Callable[[Sequence[Any], int], list[Any]]:
        """A function (arguments of a call, micro-batch) -> the arguments of that micro-batch.

        axes: over which the ranks share the samples; local: each rank passes its part of the batch, not the whole.
        Raises ConfigurationError where local parts do not split.
        """
        pieces = self.pieces(axes)
        if local:
            parts = math.prod(self.plan.layout_mesh.shape[axis] for axis in axes)
            if pieces != parts:
                raise ConfigurationError(
                    f'with batch="local" and {self.micro.count} micro-batches the batch must be a multiple of '
                    f"{self.micro.count * parts}; pass such a batch, or micro_batches=1"
                )
            pieces = 1
        dims = {
            leaf: value.batch_dim for value, leaf in input_leaves(self.micro.program) if value.batch_dim is not None
        }

        def part_of(leaves: Sequence[Any], part: int) -> list[Any]:
            return [
                leaf if index not in dims else self._samples(leaf, dims[index], part, pieces)
                for index, leaf in enumerate(leaves)
            ]

        return part_of

    def _samples(self, argument: torch.Tensor, dim: int, part: int, pieces: int) -> torch.Tensor:
        """The samples of micro-batch `part` of an argument that holds `pieces` parts of the batch."""
        shape = argument.shape
        cut = argument.reshape(*shape[:dim], pieces, self.micro.count, -1, *shape[dim + 1 :])
        return cut.select(dim + 1, part).flatten(dim, dim + 1)


def _in_order(value: torch.Tensor, dim: int, count: int, pieces: int) -> torch.Tensor:
    """Samples as (micro-batch, piece, sample) along `dim` -> as (piece, micro-batch, sample)."""
    if pieces == 1:
        return value
    shape = value.shape
    return value.reshape(*shape[:dim], count, pieces, -1, *shape[dim + 1 :]).transpose(dim, dim + 1).reshape(shape)


def scaled(value: torch.Tensor, scale: float) -> torch.Tensor:
    """The value times `scale`, in its dtype."""
    return value if scale == 1.0 else (value * scale).to(value.dtype)
