"""Rules of operators that need statistics of the whole dim: variance, logsumexp, norms of vectors, running sums.

A split of a reduced dim all_reduces one or two numbers per output element; every rank then has the result. A running
sum all_reduces a number per row and block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from autopar.rules.call import Call


def _vector_norm(call: Call) -> str:
    """The orders whose parts combine by a sum, a maximum, or a sum of squares."""
    order = call.argument("ord")
    if order == 2:
        return "... -> ... ; reduce: dim - by synchronised_norm bytes output"
    left = {1: "reduce: dim sum", math.inf: "reduce: dim max"}.get(order, "drop: dim")
    return f"... -> ... ; {left}"


def _running_sum(call: Call) -> str:
    """The bytes are those of 8 blocks; how many there are is not known here."""
    out = call.outputs[0]
    assert out is not None
    linear = "" if call.operands[0].dtype == torch.bool else " ; linear: x"
    if not out.shape:
        return f"... -> ...{linear}"
    dim = call.argument("dim") % len(out.shape)
    nbytes = 8 * out.dtype.itemsize * math.prod(size for at, size in enumerate(out.shape) if at != dim)
    return f"... -> ... ; d{dim}: by prefix_sum bytes {nbytes}{linear}"


def _linear_recurrence(call: Call) -> str:
    """The bytes are those of 8 blocks, as of a running sum; a block passes on a factor and a state."""
    out = call.outputs[0]
    assert out is not None
    dim = call.argument("dim") % len(out.shape)
    wide = max(4, out.dtype.itemsize)
    nbytes = 2 * 8 * wide * math.prod(size for at, size in enumerate(out.shape) if at != dim)
    return f"..., ... -> ... ; d{dim}: by prefix_recurrence bytes {nbytes} ; linear: - x"


STATISTICS_RULES: Mapping[str, str | Callable[[Call], str]] = {
    "aten.cumsum": _running_sum,
    "autopar.reverse_cumsum": _running_sum,
    "autopar.linear_recurrence": _linear_recurrence,
    "aten.var.correction": "... -> ... ; reduce: dim - by synchronised_variance bytes 2*output",
    "aten.std.correction": "... -> ... ; reduce: dim - by synchronised_variance bytes 2*output",
    "aten.var_mean.correction": "... -> ..., ... ; reduce: dim - by synchronised_variance bytes 2*output",
    "aten.logsumexp": "... -> ... ; reduce: dim - by synchronised_logsumexp bytes 2*output",
    "aten.linalg_vector_norm": _vector_norm,
}
