"""What a product in symmetric memory is on one rank, by its node: its parts, and the bytes that torch holds for it.

    gathered_products of 4096 x 8192 (bf16) on 4 ranks         64 MiB mapped, 256 MiB of gathered rows while it runs
    product_scattered of a product of 16384 x 8192 (bf16)      2 x 64 MiB mapped, 256 MiB of parts while it runs

A part is what one copy moves: the block of one rank. Mapped memory is torch's workspace of the group: as large as the
largest call needs, from the first call on and never freed. The rest is freed behind the call. Read from
`torch/distributed/_symmetric_memory/__init__.py` of torch 2.13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.ops.symmetric_products import gathered_products


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetricSizes:
    """Sizes of one call. rows, inner: of the left operand of a part's products, columns: of their results; moves_rows:
    dims other than the first are gathered or scattered, so torch lays operand and results out anew."""

    gathers: bool
    keeps: bool
    ranks: int
    rows: int
    inner: int
    columns: tuple[int, ...]
    itemsize: int
    moves_rows: bool

    @property
    def part_bytes(self) -> int:
        """What one copy moves."""
        return self.rows * (self.inner if self.gathers else sum(self.columns)) * self.itemsize

    @property
    def whole_bytes(self) -> int:
        """The full buffer of the collective."""
        return self.ranks * self.part_bytes

    @property
    def mapped_bytes(self) -> int:
        """Of symmetric memory: the block that others copy, or one that they copy while the next is computed."""
        return self.part_bytes * (1 if self.gathers else 2)

    @property
    def working_bytes(self) -> int:
        """Of memory that is freed behind the call, operands and results left out."""
        product = self.ranks * self.rows * self.itemsize
        anew = (product * sum(self.columns) + self.part_bytes if self.gathers else product * self.inner)
        gathered = 0 if self.gathers and self.keeps and not self.moves_rows else self.whole_bytes
        return gathered + (anew if self.moves_rows else 0)


def symmetric_sizes(node: fx.Node) -> SymmetricSizes:
    """Of a node whose target is one of `SYMMETRIC` (`ops/symmetric_products.py`)."""
    arguments: tuple[Any, ...] = node.args
    rows, weights, _, dim = arguments[:4]
    gathers = node.target is gathered_products
    columns = tuple(_shape(weight)[1] for weight in (weights if gathers else [weights]))
    count, inner = _shape(rows)
    made = _shape(node)[0] if gathers else _shape(node)
    ranks = made[0] // count if gathers else count * columns[0] // math.prod(made)
    dtype = rows.meta["dtype"]
    return SymmetricSizes(
        gathers=gathers,
        keeps=bool(gathers and arguments[4]),
        ranks=ranks,
        rows=count if gathers else count // ranks,
        inner=inner,
        columns=columns,
        itemsize=dtype.itemsize,
        moves_rows=dim > 0,
    )


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["local_shape"])
