"""Products with their collective in symmetric memory: memory that the ranks of a node map into each other.

    all_gather of rows, then products with them        ->  gathered_products(rows, [w, v], (8,), 0, False, "tp")
    a product, then reduce_scatter of its rows         ->  product_scattered(rows, w, (8,), 0, "sum", "tp")

Both are torch's operators (`torch.ops.symm_mem`, alpha in torch 2.13): every rank copies the others' blocks by copy
engines, which take no multiprocessor, while it computes the products of those that it has. Operands are matrices whose
rows count row-major through `lead`, of which the collective gathers or scatters dim `dim`. Results are contiguous
matrices again.

Torch has kernels for CUDA, and shapes for tensors without values. A process group without symmetric memory never calls
them: its plan is lowered without (`runtime/step/symmetric_memory.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar._compat import symmetric_memory  # noqa: F401 (registers the operators)


def gathered_products(
    rows: Tensor, weights: Sequence[Tensor], lead: Sequence[int], dim: int, keep: bool, group: str
) -> tuple[Tensor, ...]:
    """The products of the gathered rows with every weight, in their order, and at the end, if `keep`, these rows.

    lead: of the rows of this rank.
    """
    operands = rows.reshape(*lead, rows.shape[-1]), list(weights)
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(*operands, dim, group, return_A=keep)
    return tuple(_matrix(value) for value in (*products, *((gathered,) if keep else ())))


def product_scattered(
    rows: Tensor, weight: Tensor, lead: Sequence[int], dim: int, reduction: str, group: str
) -> Tensor:
    """The block of this rank of the sum (or mean, "avg") over the ranks of `rows @ weight`.

    lead: of the rows of the product.
    """
    operand = rows.reshape(*lead, rows.shape[-1])
    return _matrix(torch.ops.symm_mem.fused_matmul_reduce_scatter(operand, weight, reduction, dim, group))


def _matrix(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1]).contiguous()


SYMMETRIC = frozenset({gathered_products, product_scattered})
"""They start and end where they stand."""

__all__ = ["SYMMETRIC", "gathered_products", "product_scattered"]
