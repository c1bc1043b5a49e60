"""Rules of convolutions and batch norm: batch (b), channels (ci in, co out, c) and channel groups (g).

Channels of a grouped convolution are fused dims (group, channel of the group). Spatial dims stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autopar.rules.call import Call, TensorSpec


def _spatial(prefix: str, shape: Sequence[int]) -> str:
    return " ".join(f"[{prefix}{i}]" for i in range(len(shape) - 2))


def _channel_dims(call: Call) -> tuple[str, str, str, str]:
    """(channels of the input, channels of the output, the two leading dims of the weight, sizes known beforehand)."""
    groups = call.argument("groups")
    ci, co = ("ci", "co") if groups == 1 else ("(g ci)", "(g co)")
    weight = f"{ci} co" if call.argument("transposed") else f"{co} ci"
    return ci, co, weight, "" if groups == 1 else f" ; g = {groups}"


def _convolution(call: Call) -> str:
    x, weight = (spec.shape for spec in call.operands[:2])
    out = call.outputs[0]
    assert out is not None
    ci, co, channels, sizes = _channel_dims(call)
    bias = "" if call.argument("bias") is None else f", {co}"
    implementation = "" if call.argument("bias") is None else " by first_rank_bias"
    swept = x if call.argument("transposed") else out.shape
    flops = f"2*b*ci*co{'' if not sizes else '*g'}*{math.prod(weight[2:]) * math.prod(swept[2:])}"
    return (
        f"b {ci} {_spatial('x', x)}, {channels} {_spatial('k', weight)}{bias} -> b {co} {_spatial('y', out.shape)}"
        f" ; ci: sum{implementation}{sizes} ; flops: {flops}"
    )


def _convolution_backward(call: Call) -> str:
    grad, x, weight = (spec.shape for spec in call.operands)
    ci, co, channels, sizes = _channel_dims(call)
    swept = x if call.argument("transposed") else grad
    flops = f"4*b*ci*co{'' if not sizes else '*g'}*{math.prod(weight[2:]) * math.prod(swept[2:])}"
    left, right, filters = (
        f"b {co} {_spatial('y', grad)}",
        f"b {ci} {_spatial('x', x)}",
        f"{channels} {_spatial('k', weight)}",
    )
    return f"{left}, {right}, {filters} -> {right}, {filters}, {co} ; ci: -{sizes} ; flops: {flops}"


def _batch_norm(call: Call) -> str:
    """Training statistics are those of the global batch."""
    vectors, results = (_vectors(specs[1:], call) for specs in (call.operands, call.outputs))
    b = "by synchronised_batch_norm bytes 8*c" if call.argument("training") else "-"
    return f"b c [...]{vectors} -> b c [...]{results} ; b: {b}"


def _vectors(specs: Sequence[TensorSpec | None], call: Call) -> str:
    """One number per channel each, or nothing: statistics that evaluation does not save are empty."""
    channels = call.operands[0].shape[1]
    return "".join(", c" if spec and spec.shape == (channels,) else ", _" for spec in specs)


def _batch_norm_backward(call: Call) -> str:
    vectors = _vectors(call.operands[2:], call)
    b = " ; b: by synchronised_batch_norm_backward bytes 8*c" if call.argument("train") else ""
    return f"b c [...], b c [...]{vectors} -> b c [...], c, c{b}"


SPATIAL_RULES: Mapping[str, Callable[[Call], str | None]] = {
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "aten._native_batch_norm_legit_functional": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_norm,
    "aten.native_batch_norm_backward": _batch_norm_backward,
}
