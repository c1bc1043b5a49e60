"""Rules of softmax, cross-entropy and norms: rows are split freely, the normalised dims by sharing statistics.

    softmax over dim 1 of (4, 6, 3)    r0 n r1 -> r0 n r1 ; n: by split_softmax bytes 8*r0*r1

A split of the normalised dim (n) costs all_reduces of one or two fp32 numbers per row, never a gather of the rows, so
that a vocabulary or a hidden dim stays split through the norm. Weights are split with it, and so are their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autopar.rules.call import Call


def _norm(implementation: str, statistics: int, backward: bool) -> Callable[[Call], str]:
    """The rule of a norm over the last dims; forward keeps, backward reads, one or two statistics per row."""

    def rule(call: Call) -> str:
        shape = call.operands[1 if backward else 0].shape
        count = len(call.argument("normalized_shape"))
        names = [f"n{i}" for i in range(count)]
        n, ones = " ".join(names), " ".join(["1"] * count)
        stats = f", ... {ones}" * statistics
        vectors = f", {n}?" * statistics  # layer norm has mean, rstd, weight, bias; RMS norm has rstd, weight
        signature = (
            f"... {n}, ... {n}{stats}{vectors} -> ... {n}{f', {n}' * statistics}"
            if backward
            else f"... {n}{vectors} -> ... {n}{stats}"
        )
        num_bytes = 4 * statistics * math.prod(shape[: len(shape) - count])
        effects = "".join(f" ; {name}: by {implementation} bytes {num_bytes}" for name in names)
        return f"{signature}{effects}"

    return rule


_SOFTMAX = "r...{n} -> r...{n} ; at: dim ; n: by split_softmax bytes 8*..."
_SOFTMAX_BACKWARD = "r...{n}, r...{n} -> r...{n} ; at: dim ; n: by split_softmax_backward bytes 4*..."

NORM_RULES: Mapping[str, str | Callable[[Call], str | None]] = {
    "aten._softmax": _SOFTMAX,
    "aten._log_softmax": _SOFTMAX,
    "aten._safe_softmax": _SOFTMAX,
    "aten._softmax_backward_data": _SOFTMAX_BACKWARD,
    "aten._log_softmax_backward_data": _SOFTMAX_BACKWARD,
    # one length per position of the dim: w = g * v / |v|
    "aten._weight_norm_interface": "[...]{c}, [...]{c} -> [...]{c}, [...]{c} ; at: dim",
    "aten._weight_norm_interface_backward": "[...]{c}, [...]{c}, [...]{c}, [...]{c} -> [...]{c}, [...]{c} ; at: dim",
    "aten.native_layer_norm": _norm("split_norm", 2, backward=False),
    "aten.native_layer_norm_backward": _norm("split_norm_backward", 2, backward=True),
    "aten._fused_rms_norm": _norm("split_norm", 1, backward=False),
    "aten._fused_rms_norm_backward": _norm("split_norm_backward", 1, backward=True),
    # ours, over the last dim; the last operand of backward is added to the gradient of the row
    "autopar.rms_norm": "... n, n -> ... n, ... 1 ; n: by split_norm bytes 4*...",
    "autopar.rms_norm_backward": "... n, ... n, n, ... 1, ... n? -> ... n, n"
    " ; n: by split_our_norm_backward bytes 4*... ; linear: x - - - | x - - - x",
    "autopar.layer_norm": "... n, n, n -> ... n, ... 1, ... 1 ; n: by split_norm bytes 8*...",
    "autopar.layer_norm_backward": "... n, ... n, n, ... 1, ... 1, ... n? -> ... n, n, n"
    " ; n: by split_our_norm_backward bytes 8*... ; linear: x - - - - | x - - - - x",
    # of the log-probabilities every rank has those of the targets in its block of the vocabulary
    "autopar.cross_entropy": "n v, n -> n, n, n ; v: sum - - by masked_cross_entropy bytes 8*n",
    "autopar.cross_entropy_backward": "n v, n, n, n, n -> n v ; v: by masked_cross_entropy_backward"
    " ; linear: - - - - x",
    "autopar.linear_cross_entropy": "n [k], v [k], n -> n, n, n"
    " ; v: - - - by masked_linear_cross_entropy bytes 12*n ; flops: 2*n*k*v",
    "autopar.linear_cross_entropy_backward": "n [k], v [k], n, n, n, n -> n [k], v [k]"
    " ; v: sum by masked_linear_cross_entropy_backward ; linear: - - - - - x ; flops: 6*n*k*v",
}
