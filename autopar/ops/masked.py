"""Lookups and writes in a block of a split dim: positions that other ranks hold are masked.

    ids [0, 5, 9], vocabulary block [4, 8)   -->   rows [-, 1, -]; the masked rows are zeros, so the sum over the ranks
                                                   is the lookup in the whole table

`start` is the first global position that the block holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten


def _local_positions(positions: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """(positions inside the block, 0 where they lie outside; whether they lie inside)."""
    local = positions - start
    inside = (local >= 0) & (local < length)
    return local.masked_fill(~inside, 0), inside


def masked_embedding(weight: Tensor, ids: Tensor, start: int) -> Tensor:
    """Rows of a block of the table, zeros for ids outside; (V, D), (*) -> (*, D)."""
    local, inside = _local_positions(ids, start, weight.shape[0])
    rows: Tensor = _aten.embedding.default(weight, local)
    return rows.masked_fill(~inside.unsqueeze(-1), 0)


def masked_embedding_backward(
    grad: Tensor, ids: Tensor, start: int, num_rows: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Gradient of the rows [start, start + num_rows) of the table; `padding_idx` is a global id (-1: none)."""
    local, inside = _local_positions(ids, start, num_rows)
    spare = ~inside if padding_idx < 0 else ~inside | (ids == padding_idx)
    rows: Tensor = _aten.embedding_dense_backward.default(
        grad, local.masked_fill(spare, num_rows), num_rows + 1, -1, scale_grad_by_freq
    )
    return rows.narrow(0, 0, num_rows)


def masked_gather(source: Tensor, dim: int, index: Tensor, start: int) -> Tensor:
    """gather from a block of `dim`, zeros for positions outside."""
    local, inside = _local_positions(index, start, source.shape[dim])
    return source.gather(dim, local).masked_fill(~inside, 0)


def masked_index(source: Tensor, dim: int, index: Tensor, start: int, size: int) -> Tensor:
    """`source[..., index, ...]` from a block of `dim`, zeros for positions outside. Negative positions count from the
    end of the global `size`."""
    shape = (*source.shape[:dim], *index.shape, *source.shape[dim + 1 :])
    local, inside = _local_positions(index.remainder(size), start, source.shape[dim])
    rows = source.index_select(dim, local.flatten()).reshape(shape)
    following = (1,) * (source.dim() - dim - 1)
    return rows.masked_fill(~inside.reshape(*index.shape, *following), 0)


def masked_index_put(
    target: Tensor, dim: int, index: Tensor, values: Tensor, accumulate: bool, start: int, size: int
) -> Tensor:
    """`target[..., index, ...] = values` (or +=) in a block of `dim`; positions outside are dropped."""
    length = target.shape[dim]
    local, inside = _local_positions(index.remainder(size), start, length)
    indices = [None] * dim + [local.masked_fill(~inside, length)]
    written: Tensor = _aten.index_put.default(_with_spare_row(target, dim), indices, values, accumulate)
    return written.narrow(dim, 0, length).contiguous()


def masked_scatter(target: Tensor, dim: int, index: Tensor, source: Tensor | float, start: int) -> Tensor:
    """scatter of a tensor or number into a block of `dim`; positions outside are dropped."""
    length = target.shape[dim]
    local, inside = _local_positions(index, start, length)
    if index.shape[dim] != 1:
        spare = local.masked_fill(~inside, length)
        written: Tensor = torch.scatter(_with_spare_row(target, dim), dim, spare, source)
        return written.narrow(dim, 0, length).contiguous()
    kept = target.gather(dim, local)  # one position per row: write back what stands there
    return target.scatter(dim, local, torch.where(inside, source, kept).to(target.dtype))


def masked_scatter_add(target: Tensor, dim: int, index: Tensor, source: Tensor, start: int) -> Tensor:
    """scatter_add into a block of `dim`; positions outside are dropped."""
    local, inside = _local_positions(index, start, target.shape[dim])
    added = source[tuple(slice(size) for size in index.shape)].masked_fill(~inside, 0)
    return target.scatter_add(dim, local, added)


def masked_index_add(
    target: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float, start: int, size: int
) -> Tensor:
    """index_add into a block of `dim`; positions outside add zeros. Negative positions count from the end of `size`."""
    local, inside = _local_positions(index.remainder(size), start, target.shape[dim])
    shape = [1] * source.dim()
    shape[dim] = -1
    return target.index_add(dim, local, source.masked_fill(~inside.view(shape), 0), alpha=alpha)


def masked_index_copy(target: Tensor, dim: int, index: Tensor, source: Tensor | float, start: int, size: int) -> Tensor:
    """index_copy (index_fill, for a number or tensor without dims) into a block of `dim`; positions outside are
    dropped."""
    length = target.shape[dim]
    local, inside = _local_positions(index.remainder(size), start, length)
    spare, grown = local.masked_fill(~inside, length), _with_spare_row(target, dim)
    if isinstance(source, Tensor) and source.dim():
        written = grown.index_copy(dim, spare, source)
    else:
        written = torch.index_fill(grown, dim, spare, source)
    return written.narrow(dim, 0, length).contiguous()


def _with_spare_row(block: Tensor, dim: int) -> Tensor:
    """The block with one more row of zeros along `dim`, to which positions outside are written."""
    shape = list(block.shape)
    shape[dim] = 1
    return torch.cat([block, block.new_zeros(shape)], dim)
