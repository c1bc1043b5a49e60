"""Products of runs of rows, each run with a matrix of its own: what torch's `_grouped_mm` does not take.

    rows (5, K), matrices (3, K, N), counts [1, 2, 0]     -->   r0 M0, r1 M1, r2 M1, 0, 0
    left (5, A), right (5, B), counts [1, 2, 0]           -->   l0^T r0, l1^T r1 + l2^T r2, 0

The second is the gradient of the matrices; that of the rows is the first with the matrices transposed, which are read
by their strides. torch's kernel wants bf16 and sizes that are multiples of 8 (`ops/experts.py`). The bodies are the
reference: one product per run, for which they wait for the counts; the Triton kernels do not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_product_reference(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """(T, N): of rows (T, K) the first counts[0] times matrices[0] of (E, K, N), and so on; zeros behind all runs."""
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    start = 0
    for group, count in enumerate(counts.tolist()):
        torch.mm(rows[start : start + count], matrices[group], out=out[start : start + count])
        start += count
    out[start:].zero_()
    return out


def grouped_outer_reference(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """(E, A, B): per run left^T right over its rows, left (T, A), right (T, B); rows behind all runs count nowhere."""
    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    start = 0
    for group, count in enumerate(counts.tolist()):
        torch.mm(left[start : start + count].t(), right[start : start + count], out=out[group])
        start += count
    return out


grouped_product = torch.library.custom_op(
    "autopar::grouped_product",
    grouped_product_reference,
    mutates_args=(),
    schema="(Tensor rows, Tensor matrices, Tensor counts) -> Tensor",
)
grouped_outer = torch.library.custom_op(
    "autopar::grouped_outer",
    grouped_outer_reference,
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor counts) -> Tensor",
)


@grouped_product.register_fake
def _(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    return left.new_empty(counts.shape[0], left.shape[1], right.shape[1])
