"""Product and cross-entropy in chunks: torch's products, and between them the Triton kernels of cross-entropy.

The functions have the signatures of the references in `autopar.ops.linear_cross_entropy`. The gradient of logits is
written over them: a program of `backward_kernel` reads no logits but those that it writes.
"""

from __future__ import annotations

from torch import Tensor

from autopar.ops.linear_cross_entropy import gradients_in_chunks, rows_in_chunks
from autopar.runtime.kernels.triton_cross_entropy import cross_entropy_rows, write_gradient


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `linear_cross_entropy_reference`."""
    return rows_in_chunks(hidden, weight, target, start, cross_entropy_rows)


def linear_cross_entropy_backward(
    hidden: Tensor, weight: Tensor, target: Tensor, top: Tensor, log_total: Tensor, scale: Tensor, start: int
) -> tuple[Tensor, Tensor]:
    """As `linear_cross_entropy_backward_reference`."""
    return gradients_in_chunks(hidden, weight, target, top, log_total, scale, start, write_gradient)
