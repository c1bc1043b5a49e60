"""What every rank holds of a global tensor, and the global tensor from what they hold: the independent reference.

Index sets come from `layout.local_runs` per dim; nothing here uses the code under test.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from autopar.layouts.placement import Layout, Mesh, Partial, Replicate, Shard, is_legal, local_runs


def indices(size: int, layout: Layout, dim: int, mesh: Mesh, rank: int) -> Tensor:
    """Global indices of `dim` that `rank` holds, in local order."""
    runs = local_runs(size, layout, dim, mesh, mesh.coordinate(rank))
    return torch.tensor([i for start, length in runs for i in range(start, start + length)], dtype=torch.long)


def block_of(x: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """Block of `rank`, Partial axes read as replicated."""
    for dim in range(x.dim()):
        x = x.index_select(dim, indices(x.shape[dim], layout, dim, mesh, rank))
    return x


def distribute(x: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """Blocks of all ranks; values of Partial axes differ between ranks and reduce to `x`."""
    operations = {p.op for p in layout if isinstance(p, Partial)}
    assert len(operations) <= 1
    blocks = [block_of(x, layout, mesh, rank).clone() for rank in range(mesh.size)]
    for axis, placement in enumerate(layout):
        if isinstance(placement, Partial):
            for rank in range(mesh.size):
                blocks[rank] = _share(blocks[rank], placement.op, mesh.coordinate(rank)[axis], mesh.shape[axis])
    return blocks


def _share(block: Tensor, operation: str, position: int, extent: int) -> Tensor:
    if operation == "sum":  # shares 1, 2, .., extent - 1 and what is missing: exact for small integers
        others = extent * (extent - 1) // 2
        return block * (position + 1) if position < extent - 1 else block * (1 - others)
    if position == 0:
        return block
    return block - position if operation == "max" else block + position


def assemble(blocks: list[Tensor], shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Tensor:
    """The global tensor; fails if ranks that should agree differ, or if an index is held by nobody."""
    order = [axis for axis, p in enumerate(layout) if isinstance(p, Partial)]
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    ranks: dict[tuple[int, ...], int] = {}
    for rank, held in enumerate(blocks):
        key = tuple(c for axis, c in enumerate(mesh.coordinate(rank)) if axis not in order)
        groups.setdefault(key, []).append(held)
        ranks.setdefault(key, rank)
    result = torch.full(shape, float("nan"), dtype=torch.float64)
    for key, held in groups.items():
        operation = next((p.op for p in layout if isinstance(p, Partial)), "sum")
        total = held[0].double()
        for other in held[1:]:
            reduced = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[operation]
            total = reduced(total, other.double())
        where = [indices(shape[dim], layout, dim, mesh, ranks[key]) for dim in range(len(shape))]
        known = result[torch.meshgrid(*where, indexing="ij")] if where else result
        assert total.shape == known.shape, f"{tuple(total.shape)} held, {tuple(known.shape)} expected"
        assert bool((known.isnan() | torch.isclose(known, total)).all()), "ranks that hold the same indices differ"
        if where:
            result[torch.meshgrid(*where, indexing="ij")] = total
        else:
            result = total
    assert not bool(result.isnan().any()), "an index is held by no rank"
    return result


def layouts(
    shape: tuple[int, ...], mesh: Mesh, splits: tuple[int, ...], partial: tuple[str, ...], zigzags: tuple[int, ...] = ()
) -> list[Layout]:
    """All legal layouts with these splits (in zigzag order, too) and Partial operations, at most one per layout."""
    single = [Replicate(), *(Partial(op) for op in partial)]
    single += [Shard(dim, split) for dim in range(len(shape)) for split in splits]
    single += [Shard(dim, split, zigzag=True) for dim in range(len(shape)) for split in zigzags]
    found = []
    for layout in itertools.product(single, repeat=len(mesh.shape)):
        if len({p.op for p in layout if isinstance(p, Partial)}) <= 1 and is_legal(shape, layout, mesh):
            found.append(layout)
    return found
