"""Rules of convolutions, batch and group norm: batch (b), channels (ci in, co out, c), channel groups (g), rows (s).

Channels of a grouped convolution are fused dims (group, channel of the group). Spatial dims are split with a halo
(`windows.py` says which can be); statistics of norms are those of the whole batch, wherever it is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.rules.call import Call, TensorSpec
from autopar.rules.windows import SpatialDims, per_dim, spatial_dims, windows_of


def _whole(prefix: str, shape: Sequence[int]) -> str:
    return " ".join(f"[{prefix}{i}]" for i in range(len(shape) - 2))


def _channel_dims(call: Call) -> tuple[str, str, str, str]:
    """(channels of the input, channels of the output, the two leading dims of the weight, sizes known beforehand)."""
    groups = call.argument("groups")
    ci, co = ("ci", "co") if groups == 1 else ("(g ci)", "(g co)")
    weight = f"{ci} co" if call.argument("transposed") else f"{co} ci"
    return ci, co, weight, "" if groups == 1 else f" ; g = {groups}"


def _convolution(call: Call) -> str:
    x, weight = call.operands[0], call.operands[1].shape
    out = call.outputs[0]
    assert out is not None
    ci, co, channels, sizes = _channel_dims(call)
    bias = "" if call.argument("bias") is None else f", {co}"
    implementation = "" if call.argument("bias") is None else " by split_convolution"
    swept = x.shape if call.argument("transposed") else out.shape
    flops = f"2*b*ci*co{'' if not sizes else '*g'}*{math.prod(weight[2:]) * math.prod(swept[2:])}"
    dims = _convolved_dims(call, x, out, weight)
    return (
        f"b {ci} {dims.inputs}, {channels} {_whole('k', weight)}{bias} -> b {co} {dims.outputs}"
        f" ; ci: sum{implementation}{sizes}{dims.sizes}{dims.effects('split_convolution')} ; flops: {flops}"
    )


def _convolution_backward(call: Call) -> str:
    grad, x, weight = call.operands[0], call.operands[1], call.operands[2].shape
    ci, co, channels, sizes = _channel_dims(call)
    swept = x.shape if call.argument("transposed") else grad.shape
    flops = f"4*b*ci*co{'' if not sizes else '*g'}*{math.prod(weight[2:]) * math.prod(swept[2:])}"
    dims = _convolved_dims(call, x, grad, weight)
    left, right, filters = f"b {co} {dims.outputs}", f"b {ci} {dims.inputs}", f"{channels} {_whole('k', weight)}"
    halos = dims.effects("split_convolution_backward", "sum", exchanges=2)
    return f"{left}, {right}, {filters} -> {right}, {filters}, {co} ; ci: -{sizes}{dims.sizes}{halos} ; flops: {flops}"


def _convolved_dims(call: Call, x: TensorSpec, out: TensorSpec, weight: Sequence[int]) -> SpatialDims:
    """Spatial dims of x and out. A transposed convolution splits those whose windows lie side by side; all others of
    it stay whole."""
    windows = windows_of(call, len(weight) - 2, weight[2:])
    if not call.argument("transposed"):
        return spatial_dims(windows, x.shape, out.shape, x.dtype.itemsize, other_lengths=True)
    padded = per_dim(call.argument("output_padding"), len(windows))
    apart = [
        window.kernel == window.stride and not window.needs_halo and not p
        for window, p in zip(windows, padded, strict=True)
    ]
    swapped = spatial_dims(windows, out.shape, x.shape, x.dtype.itemsize, apart)
    return replace(swapped, inputs=swapped.outputs, outputs=swapped.inputs)


def _batch_norm(call: Call) -> str:
    """Training statistics are those of the global batch."""
    vectors, results = (_vectors(specs[1:], call) for specs in (call.operands, call.outputs))
    effect = "by synchronised_batch_norm bytes 8*c" if call.argument("training") else "-"
    return f"b c ...{vectors} -> b c ...{results}{_for_all(_batch_names(call), effect)}"


def _batch_names(call: Call) -> list[str]:
    """The dims over which the statistics of a channel run."""
    return ["b", *_position_names(call)]


def _position_names(call: Call) -> list[str]:
    return [f"d{i}" for i in range(len(call.operands[0].shape) - 2)]


def _for_all(names: Sequence[str], effect: str) -> str:
    return "".join(f" ; {name}: {effect}" for name in names)


def _vectors(specs: Sequence[TensorSpec | None], call: Call) -> str:
    """One number per channel each, or nothing: statistics that evaluation does not save are empty."""
    channels = call.operands[0].shape[1]
    return "".join(", c" if spec and spec.shape == (channels,) else ", _" for spec in specs)


def _batch_norm_backward(call: Call) -> str:
    vectors = _vectors(call.operands[2:], call)
    effect = "by synchronised_batch_norm_backward bytes 8*c"
    effects = _for_all(_batch_names(call), effect) if call.argument("train") else ""
    return f"b c ..., b c ...{vectors} -> b c ..., c, c{effects}"


SPATIAL_RULES: Mapping[str, str | Callable[[Call], str | None]] = {
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "aten._native_batch_norm_legit_functional": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_norm,
    "aten.native_batch_norm_backward": _batch_norm_backward,
    # statistics of a group run over its channels and all positions
    "aten.native_group_norm": "b (g c) ..., (g c)?, (g c)? -> b (g c) ..., b g, b g ; g = group"
    " ; c: by synchronised_group_norm bytes 8*b*g ; ...: by synchronised_group_norm bytes 8*b*g",
    "aten.native_group_norm_backward": "b (g c) ..., b (g c) ..., b g, b g, (g c)? -> b (g c) ..., (g c), (g c)"
    " ; g = group ; c: by synchronised_group_norm_backward bytes 8*b*g"
    " ; ...: sum by synchronised_group_norm_backward bytes 8*b*g",
}
