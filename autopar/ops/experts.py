"""The product of mixture-of-experts layers: every row with the matrix of its own expert.

    x (5, K), weight (3, K, N), ids [2, 0, 2, 1, 7]   -->   rows x0 W2, x1 W0, x2 W2, x3 W1, 0

A rank sorts its own rows only and nothing about the routing leaves it. An id outside [0, number of experts) gives a
zero row: with the ids shifted by the first expert of a block, the sum over all blocks is the whole product, which is
expert parallelism.

`expert_linear` and `expert_outer` take rows in any order: captured graphs hold these, since their rows can be split.
Lowered graphs sort the rows of a layer once (`passes/kernels/sort_by_expert.py`) and hold the others:

    order, places, counts = expert_order(ids, 3, 0)                  [1, 3, 0, 2, 4], [2, 0, 3, 1, 4], [1, 1, 2]
    y = sorted_expert_linear(rows_at(x, order), weight, counts)      x1 W0, x3 W1, x0 W2, x2 W2, 0
    rows_at(y, places)                                               as above

Sorted products run in torch's grouped kernel where it takes them, else as `ops/grouped_products.py` says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar._compat import grouped_mm
from autopar.ops.capability import capability
from autopar.ops.dispatch import Dispatch
from autopar.ops.grouped_products import grouped_outer, grouped_product

_GROUPED_ALIGNMENT = 8  # bf16 elements in 16 bytes: the kernel wants rows that start on such a boundary
_GROUPED_CAPABILITY = (8, 0)


@torch.library.custom_op(
    "autopar::expert_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor expert_ids, bool transposed) -> Tensor",
)
def expert_linear(x: Tensor, weight: Tensor, expert_ids: Tensor, transposed: bool) -> Tensor:
    """(T, N): row t of x (T, K) times matrix expert_ids[t] of weight (E, K, N), or (E, N, K) if `transposed`.

    expert_ids (T,) int64; ids outside [0, E) give zero rows.
    """
    order, places, counts = expert_order(expert_ids, weight.shape[0], 0)
    product: Tensor = sorted_expert_linear(rows_at(x, order), weight, counts, transposed)
    return rows_at(product, places)


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, expert_ids: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if transposed else 2])


@torch.library.custom_op(
    "autopar::expert_outer",
    mutates_args=(),
    schema="(Tensor x, Tensor grad, Tensor expert_ids, int num_experts, bool transposed) -> Tensor",
)
def expert_outer(x: Tensor, grad: Tensor, expert_ids: Tensor, num_experts: int, transposed: bool) -> Tensor:
    """(E, K, N), or (E, N, K) if `transposed`: per expert x^T grad over its rows; x (T, K), grad (T, N).

    The gradient of the weight of `expert_linear`; rows with ids outside [0, num_experts) count nowhere.
    """
    order, _, counts = expert_order(expert_ids, num_experts, 0)
    out: Tensor = sorted_expert_outer(rows_at(x, order), rows_at(grad, order), counts, transposed)
    return out


@expert_outer.register_fake
def _(x: Tensor, grad: Tensor, expert_ids: Tensor, num_experts: int, transposed: bool) -> Tensor:
    left, right = (grad, x) if transposed else (x, grad)
    return x.new_empty(num_experts, left.shape[1], right.shape[1])


def block_expert_linear(x: Tensor, weight: Tensor, expert_ids: Tensor, transposed: bool, start: int) -> Tensor:
    """`expert_linear` with a block of experts that begins at `start`; rows of other experts are zero."""
    out: Tensor = expert_linear(x, weight, expert_ids - start, transposed)
    return out


def block_expert_outer(
    x: Tensor, grad: Tensor, expert_ids: Tensor, num_experts: int, transposed: bool, start: int
) -> Tensor:
    """`expert_outer` of the experts [start, start + num_experts)."""
    out: Tensor = expert_outer(x, grad, expert_ids - start, num_experts, transposed)
    return out


def dispatched_expert_linear(
    x: Tensor, weight: Tensor, expert_ids: Tensor, transposed: bool, there: Dispatch
) -> Tensor:
    """`expert_linear` whose rows travel to the experts of other ranks; weight: of the experts that this rank holds.

    A form between two passes: `sort_by_expert` writes what moves the rows. Raises RuntimeError where it runs on values.
    """
    _refuse_values(x, there)
    return x.new_empty(x.shape[0], weight.shape[1 if transposed else 2])


def dispatched_expert_outer(
    x: Tensor, grad: Tensor, expert_ids: Tensor, num_experts: int, transposed: bool, there: Dispatch
) -> Tensor:
    """`expert_outer` of rows that travel; num_experts: those that this rank holds. As `dispatched_expert_linear`."""
    _refuse_values(x, there)
    left, right = (grad, x) if transposed else (x, grad)
    return x.new_empty(num_experts, left.shape[1], right.shape[1])


def _refuse_values(x: Tensor, there: Dispatch) -> None:
    if not x.is_meta:
        raise RuntimeError(f"rows of {tuple(x.shape)} are to travel over {there.group}: sort_by_expert has not run")


@torch.library.custom_op(
    "autopar::expert_order",
    mutates_args=(),
    schema="(Tensor expert_ids, int num_experts, int start) -> (Tensor, Tensor, Tensor)",
)
def expert_order(expert_ids: Tensor, num_experts: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order of the rows by expert, those of no expert last (T,); place of every row in it (T,); rows per expert (E,).

    expert_ids (T,) int64; the experts are [start, start + num_experts).
    """
    keys = expert_ids - start
    keys.masked_fill_((keys < 0) | (keys > num_experts), num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=keys.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    order = keys.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return order, places, counts[:num_experts]


@expert_order.register_fake
def _(expert_ids: Tensor, num_experts: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(expert_ids), torch.empty_like(expert_ids), expert_ids.new_empty(num_experts)


def rows_at(x: Tensor, index: Tensor, has_gaps: bool = False) -> Tensor:
    """Rows index (N,) of x (T, ...), which are moved once: (N, ...). has_gaps: an index T says a row of zeros.

    torch's index_select, under a name of its own: wide rows that change places move at the rate of memory on GPUs too,
    since it became torch's vectorised gather in 2025 (https://github.com/pytorch/pytorch/pull/151715); lookups in a
    table are priced by measurements of older kernels.
    """
    if not has_gaps:
        return x.index_select(0, index)
    gaps = (index == x.shape[0]).view(-1, *[1] * (x.ndim - 1))
    return x.index_select(0, index.clamp(max=x.shape[0] - 1)).masked_fill(gaps, 0)


@torch.library.custom_op(
    "autopar::sorted_expert_linear",
    mutates_args=(),
    schema="(Tensor rows, Tensor weight, Tensor counts, bool transposed) -> Tensor",
)
def sorted_expert_linear(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    """`expert_linear` of rows (T, K) in `expert_order`, counts[e] of them for expert e; those behind give zeros."""
    matrices = weight.transpose(1, 2) if transposed else weight
    if not rows.shape[0]:
        return rows.new_empty(0, matrices.shape[2])
    if _has_kernel(rows, matrices):
        return _grouped_rows(rows, matrices, counts)
    product: Tensor = grouped_product(rows, matrices, counts)
    return product


@sorted_expert_linear.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1 if transposed else 2])


@torch.library.custom_op(
    "autopar::sorted_expert_outer",
    mutates_args=(),
    schema="(Tensor x, Tensor grad, Tensor counts, bool transposed) -> Tensor",
)
def sorted_expert_outer(x: Tensor, grad: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    """`expert_outer` of rows x (T, K) and grad (T, N) in `expert_order`; those behind all experts count nowhere."""
    left, right = (grad, x) if transposed else (x, grad)
    if not left.shape[0]:
        return left.new_zeros(len(counts), left.shape[1], right.shape[1])
    if _has_kernel(left, right):
        return _grouped_outer(left, right, counts)
    product: Tensor = grouped_outer(left, right, counts)
    return product


@sorted_expert_outer.register_fake
def _(x: Tensor, grad: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    left, right = (grad, x) if transposed else (x, grad)
    return x.new_empty(counts.shape[0], left.shape[1], right.shape[1])


def _has_kernel(first: Tensor, second: Tensor) -> bool:
    """Whether torch's grouped kernel takes these operands: bf16 on CUDA, sizes aligned."""
    if first.device.type != "cuda" or first.dtype != torch.bfloat16 or second.dtype != torch.bfloat16:
        return False
    aligned = all(size % _GROUPED_ALIGNMENT == 0 for size in (first.shape[-1], second.shape[-1], second.shape[-2]))
    return aligned and capability(first.device) >= _GROUPED_CAPABILITY


def _grouped_rows(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """As `grouped_product`, by torch's kernel, which leaves rows without an expert unwritten."""
    ends = counts.cumsum(0)
    written = torch.arange(rows.shape[0], device=rows.device) < ends[-1]
    return grouped_mm(rows, matrices, ends.to(torch.int32)).masked_fill(~written.unsqueeze(1), 0)


def _grouped_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """As `grouped_outer`, by torch's kernel."""
    return grouped_mm(left.t(), right, counts.cumsum(0).to(torch.int32))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, expert_ids, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, expert_ids)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, expert_ids = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = expert_linear(grad, weight, expert_ids, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        grad_weight = expert_outer(x, grad, expert_ids, weight.shape[0], ctx.transposed)
    return grad_x, grad_weight, None, None


expert_linear.register_autograd(_backward, setup_context=_save)
