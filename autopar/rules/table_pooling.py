"""Rules of pooling, interpolation, padding and sampling of images and sounds.

Batch and channels are split everywhere. Rows are split by pooling whose windows align with the blocks (`windows.py`)
and by nearest interpolation with a whole factor; other interpolation, padding at the borders and adaptive pooling keep
them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.rules.call import Call
from autopar.rules.windows import SpatialDims, spatial_dims, windows_of


def _max_pool(call: Call) -> str:
    out = call.outputs[0]
    assert out is not None
    dims = _pooled_dims(call, call.operands[0].shape, out.shape)
    effects = dims.effects("split_max_pool", always=True)
    return f"... {dims.inputs} -> ... {dims.outputs}, ... {dims.outputs}{dims.sizes}{effects}"


def _max_pool_backward(call: Call) -> str:
    dims = _pooled_dims(call, call.operands[1].shape, call.operands[0].shape)
    effects = dims.effects("split_max_pool_backward", always=True)
    out, inner = f"... {dims.outputs}", f"... {dims.inputs}"
    return f"{out}, {inner}, {out} -> {inner}{dims.sizes}{effects}"


def _avg_pool(call: Call) -> str:
    out = call.outputs[0]
    assert out is not None
    dims = _pooled_dims(call, call.operands[0].shape, out.shape)
    return f"... {dims.inputs} -> ... {dims.outputs} ; linear: x{dims.sizes}{dims.effects('split_avg_pool')}"


def _avg_pool_backward(call: Call) -> str:
    dims = _pooled_dims(call, call.operands[1].shape, call.operands[0].shape)
    effects = dims.effects("split_avg_pool_backward")
    return f"... {dims.outputs}, ... {dims.inputs} -> ... {dims.inputs} ; linear: x -{dims.sizes}{effects}"


def _pooled_dims(call: Call, shape: tuple[int, ...], output: tuple[int, ...]) -> SpatialDims:
    """An average that leaves out the padding divides by another count at the border: padded dims of it stay whole."""
    kernel = call.argument("kernel_size")
    count = int(str(call.target).partition("_pool")[2][0])
    windows = windows_of(call, count, kernel)
    names = {argument.name for argument in call.target._schema.arguments}
    counts_padding = "count_include_pad" not in names or call.argument("count_include_pad")
    allowed = [bool(counts_padding) or window.padding == 0 for window in windows]
    item_bytes = call.operands[0].dtype.itemsize
    return spatial_dims(windows, shape, output, item_bytes, allowed)


def _nearest(call: Call) -> str:
    """Rows with a whole number of copies are split."""
    out = call.outputs[0]
    assert out is not None
    inner, outer, sizes = _copied_dims(call, call.operands[0].shape, out.shape)
    return f"b c {inner} -> b c {outer} ; linear: x{sizes}"


def _nearest_backward(call: Call) -> str:
    out = call.outputs[0]
    assert out is not None
    inner, outer, sizes = _copied_dims(call, out.shape, call.operands[0].shape)
    return f"b c {outer} -> b c {inner} ; linear: x{sizes}"


def _copied_dims(call: Call, shape: tuple[int, ...], output: tuple[int, ...]) -> tuple[str, str, str]:
    """(dims of the small tensor, of the large one, sizes)."""
    inner, outer, sizes = [], [], ""
    for i, (size, large) in enumerate(zip(shape[2:], output[2:], strict=True)):
        if large % size or not str(call.target).endswith("default"):
            inner.append("_")
            outer.append("_")
        else:
            inner.append(f"s{i}")
            outer.append(f"(s{i} [t{i}])")
            sizes += f" ; t{i} = {large // size}"
    return " ".join(inner), " ".join(outer), sizes


_ADAPTIVE: Mapping[str, str] = {
    "aten._adaptive_avg_pool2d": "... _ _ -> ... _ _ ; linear: x",
    "aten._adaptive_avg_pool2d_backward": "... _ _, ... _ _ -> ... _ _ ; linear: x -",
    "aten._adaptive_avg_pool3d": "... _ _ _ -> ... _ _ _ ; linear: x",
    "aten._adaptive_avg_pool3d_backward": "... _ _ _, ... _ _ _ -> ... _ _ _ ; linear: x -",
    "aten.adaptive_max_pool2d": "... _ _ -> ... _ _, ... _ _",
    "aten.adaptive_max_pool2d_backward": "... _ _, ... _ _, ... _ _ -> ... _ _",
    "aten.adaptive_max_pool3d": "... _ _ _ -> ... _ _ _, ... _ _ _",
    "aten.adaptive_max_pool3d_backward": "... _ _ _, ... _ _ _, ... _ _ _ -> ... _ _ _",
    "aten.max_unpool2d": "... _ _, ... _ _ -> ... _ _",
    "aten.max_unpool3d": "... _ _ _, ... _ _ _ -> ... _ _ _",
}

_INTERPOLATION: Mapping[str, str] = {
    "aten.upsample_linear1d": "b c _ -> b c _ ; linear: x",
    "aten.upsample_linear1d_backward": "b c _ -> b c _ ; linear: x",
    "aten.upsample_bilinear2d": "b c _ _ -> b c _ _ ; linear: x",
    "aten.upsample_bilinear2d_backward": "b c _ _ -> b c _ _ ; linear: x",
    "aten.upsample_bicubic2d": "b c _ _ -> b c _ _ ; linear: x",
    "aten.upsample_bicubic2d_backward": "b c _ _ -> b c _ _ ; linear: x",
    "aten.upsample_trilinear3d": "b c _ _ _ -> b c _ _ _ ; linear: x",
    "aten.upsample_trilinear3d_backward": "b c _ _ _ -> b c _ _ _ ; linear: x",
    "aten._upsample_bilinear2d_aa": "b c _ _ -> b c _ _ ; linear: x",
    "aten._upsample_bilinear2d_aa_backward": "b c _ _ -> b c _ _ ; linear: x",
    "aten._upsample_bicubic2d_aa": "b c _ _ -> b c _ _ ; linear: x",
    "aten._upsample_bicubic2d_aa_backward": "b c _ _ -> b c _ _ ; linear: x",
    "aten._upsample_nearest_exact1d": "b c _ -> b c _ ; linear: x",
    "aten._upsample_nearest_exact1d_backward": "b c _ -> b c _ ; linear: x",
    "aten._upsample_nearest_exact2d": "b c _ _ -> b c _ _ ; linear: x",
    "aten._upsample_nearest_exact2d_backward": "b c _ _ -> b c _ _ ; linear: x",
    "aten.grid_sampler_2d": "b c _ _, b h w _ -> b c h w ; linear: x -",
    "aten.grid_sampler_2d_backward": "b c h w, b c _ _, b h w _ -> b c _ _, b h w _",
    "aten.grid_sampler_3d": "b c _ _ _, b d h w _ -> b c d h w ; linear: x -",
    "aten.grid_sampler_3d_backward": "b c d h w, b c _ _ _, b d h w _ -> b c _ _ _, b d h w _",
}

_BORDERS: Mapping[str, str] = {
    "aten.reflection_pad1d": "... _ -> ... _ ; linear: x",
    "aten.reflection_pad1d_backward": "... _, ... _ -> ... _ ; linear: x -",
    "aten.reflection_pad2d": "... _ _ -> ... _ _ ; linear: x",
    "aten.reflection_pad2d_backward": "... _ _, ... _ _ -> ... _ _ ; linear: x -",
    "aten.reflection_pad3d": "... _ _ _ -> ... _ _ _ ; linear: x",
    "aten.reflection_pad3d_backward": "... _ _ _, ... _ _ _ -> ... _ _ _ ; linear: x -",
    "aten.replication_pad1d": "... _ -> ... _ ; linear: x",
    "aten.replication_pad1d_backward": "... _, ... _ -> ... _ ; linear: x -",
    "aten.replication_pad2d": "... _ _ -> ... _ _ ; linear: x",
    "aten.replication_pad2d_backward": "... _ _, ... _ _ -> ... _ _ ; linear: x -",
    "aten.replication_pad3d": "... _ _ _ -> ... _ _ _ ; linear: x",
    "aten.replication_pad3d_backward": "... _ _ _, ... _ _ _ -> ... _ _ _ ; linear: x -",
}

_REARRANGED: Mapping[str, str] = {
    "aten.pixel_shuffle": "... (c [q]) _ _ -> ... c _ _ ; linear: x",
    "aten.pixel_unshuffle": "... c _ _ -> ... (c [q]) _ _ ; linear: x",
    "aten.channel_shuffle": "b _ ... -> b _ ... ; linear: x",
    "aten.im2col": "... c _ _ -> ... (c [q]) _ ; linear: x",
    "aten.col2im": "... (c [q]) _ -> ... c _ _ ; linear: x",
}

POOLING_RULES: Mapping[str, str | Callable[[Call], str | None]] = {
    **_ADAPTIVE,
    **_INTERPOLATION,
    **_BORDERS,
    **_REARRANGED,
    "aten.max_pool2d_with_indices": _max_pool,
    "aten.max_pool2d_with_indices_backward": _max_pool_backward,
    "aten.max_pool3d_with_indices": _max_pool,
    "aten.max_pool3d_with_indices_backward": _max_pool_backward,
    "aten.avg_pool1d": _avg_pool,
    "aten.avg_pool2d": _avg_pool,
    "aten.avg_pool2d_backward": _avg_pool_backward,
    "aten.avg_pool3d": _avg_pool,
    "aten.avg_pool3d_backward": _avg_pool_backward,
    "aten.upsample_nearest1d": _nearest,
    "aten.upsample_nearest1d_backward": _nearest_backward,
    "aten.upsample_nearest2d": _nearest,
    "aten.upsample_nearest2d_backward": _nearest_backward,
    "aten.upsample_nearest3d": _nearest,
    "aten.upsample_nearest3d_backward": _nearest_backward,
}
