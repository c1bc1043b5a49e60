"""Pack and unpack around all_to_all and reduce_scatter as one copy each, padding and trimming included.

    pack(x[4, 6], 1, 1, 2, 6)         -> [8, 3]: columns 0..2 over columns 3..5          `blocks.pieces_first`, one cut
    unpack(y[8, 3], 1, 1, 2, 6, 6)    -> x again                                         `blocks.pieces_joined`

A cut sees `dim`, grown with zeros to `padded` elements, as (position, pieces, rest) and lays its middle factor one
behind the other along dim 0. `blocks` takes several cuts, and pads and permutes in separate passes: the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ops import blocks


def pack_reference(x: Tensor, dim: int, position: int, pieces: int, padded: int) -> Tensor:
    """(pieces * d0, ...): the pieces of `x`, one behind the other along dim 0."""
    shape = _with_size(x.shape, dim, padded)
    packed = blocks.pieces_first(x, [(dim, position, pieces)], shape)
    return packed.clone() if packed.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else packed


def unpack_reference(y: Tensor, dim: int, position: int, pieces: int, padded: int, size: int) -> Tensor:
    """Inverse of `pack`: the first `size` elements along `dim` of what was packed."""
    shape = _whole(y.shape, dim, pieces, padded)
    joined = blocks.pieces_joined(y, [(dim, position, pieces)], shape, _with_size(shape, dim, size))
    return joined.clone() if joined.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() else joined


def _with_size(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _whole(packed: tuple[int, ...], dim: int, pieces: int, padded: int) -> tuple[int, ...]:
    """The shape before packing: dim 0 of the packed tensor counts the pieces, too."""
    return _with_size((packed[0] // pieces, *packed[1:]), dim, padded)


pack = torch.library.custom_op(
    "autopar::pack",
    pack_reference,
    mutates_args=(),
    schema="(Tensor x, int dim, int position, int pieces, int padded) -> Tensor",
)
unpack = torch.library.custom_op(
    "autopar::unpack",
    unpack_reference,
    mutates_args=(),
    schema="(Tensor y, int dim, int position, int pieces, int padded, int size) -> Tensor",
)


@pack.register_fake
def _(x: Tensor, dim: int, position: int, pieces: int, padded: int) -> Tensor:
    sizes = list(_with_size(tuple(x.shape), dim, padded // pieces))
    sizes[0] *= pieces
    return x.new_empty(sizes)


@unpack.register_fake
def _(y: Tensor, dim: int, position: int, pieces: int, padded: int, size: int) -> Tensor:
    return y.new_empty(_with_size(_whole(tuple(y.shape), dim, pieces, padded), dim, size))
