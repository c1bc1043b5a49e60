"""Cases of pooling, interpolation, padding and sampling of images and sounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.rules.case_values import Arguments, Case, case, x

aten = torch.ops.aten
Shape = Callable[[int], tuple[int, ...]]


def _max_pool_backward(forward: Any, shape: Shape, *options: Any) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        value = x(*shape(s))
        out, indices = forward(value, *options)
        count = value.dim() - 2
        return x(*out.shape), value, *options, [1] * count, False, indices

    return build


def _avg_pool_backward(forward: Any, shape: Shape, *options: Any) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        value = x(*shape(s))
        out = forward(value, *options)
        rest = (False, True, None)[len(options) - 3 :]
        return x(*out.shape), value, *options, *rest

    return build


def _adaptive_max_backward(s: int) -> Arguments:
    value = x(s, 3, 4, 4, 4)
    out, indices = aten.adaptive_max_pool3d.default(value, [2, 2, 1])
    return x(*out.shape), value, indices


def _padded(name: str, num_dims: int) -> list[Case]:
    """Forward and backward of a padding at the borders."""
    inner, outer = (4,) * num_dims, (7,) * num_dims
    pad = [1, 2] * num_dims
    forward, backward = (getattr(aten, f"{name}_pad{num_dims}d{part}").default for part in ("", "_backward"))
    return [
        case(forward, lambda s: (x(s, 3, *inner), pad)),
        case(backward, lambda s: (x(s, 3, *outer), x(s, 3, *inner), pad)),
    ]


def _resized(name: str, num_dims: int, *options: Any) -> list[Case]:
    """Forward and backward of an interpolation to another than a whole multiple."""
    small, large = [4] * num_dims, [6] * num_dims
    forward, backward = (getattr(aten, f"{name}{part}").default for part in ("", "_backward"))
    return [
        case(forward, lambda s: (x(s, 3, *small), large, *options)),
        case(backward, lambda s: (x(s, 3, *large), large, [s, 3, *small], *options)),
    ]


def _multiplied(num_dims: int, factor: int) -> list[Case]:
    """Forward and backward of a nearest interpolation to a whole multiple."""
    rest = [3] * (num_dims - 1)
    grown = [factor * size for size in rest]
    forward, backward = (getattr(aten, f"upsample_nearest{num_dims}d{part}").default for part in ("", "_backward"))
    return [
        case(forward, lambda s: (x(2, 4, s, *rest), [factor * s, *grown]), "rows"),
        case(backward, lambda s: (x(2, 4, factor * s, *grown), [factor * s, *grown], [2, 4, s, *rest]), "rows"),
    ]


_IMAGE: Shape = lambda s: (2, 3, s, 6)  # noqa: E731
_WIDE: Shape = lambda s: (2, 3, 2 * s, 6)  # noqa: E731
_VOLUME: Shape = lambda s: (2, 2, 2 * s, 4, 4)  # noqa: E731

_MAX_POOL = aten.max_pool2d_with_indices
_WINDOWS = {
    "side_by_side": (_WIDE, [2, 2], [2, 2], [0, 0]),
    "overlapping": (_WIDE, [3, 3], [2, 2], [1, 1]),
    "same": (_IMAGE, [3, 5], [1, 1], [1, 2]),
}

POOLING = [
    *[case(_MAX_POOL.default, lambda s, w=w: (x(*w[0](s)), *w[1:]), n) for n, w in _WINDOWS.items()],
    *[
        case(aten.max_pool2d_with_indices_backward.default, _max_pool_backward(_MAX_POOL.default, *w), n)
        for n, w in _WINDOWS.items()
    ],
    *[case(aten.avg_pool2d.default, lambda s, w=w: (x(*w[0](s)), *w[1:]), n) for n, w in _WINDOWS.items()],
    *[
        case(aten.avg_pool2d_backward.default, _avg_pool_backward(aten.avg_pool2d.default, *w), n)
        for n, w in _WINDOWS.items()
    ],
    case(
        aten.avg_pool2d.default,
        lambda s: (x(*_IMAGE(s)), [3, 3], [1, 1], [1, 1], False, False),
        "without_padding_counted",
    ),
    case(aten.avg_pool1d.default, lambda s: (x(2, 3, s), [3], [1], [1]), "same"),
    case(aten.avg_pool3d.default, lambda s: (x(*_VOLUME(s)), [2, 2, 2]), "rows"),
    case(
        aten.avg_pool3d_backward.default,
        _avg_pool_backward(aten.avg_pool3d.default, _VOLUME, [2, 2, 2], [2, 2, 2], [0, 0, 0]),
        "rows",
    ),
    case(aten.max_pool3d_with_indices.default, lambda s: (x(*_VOLUME(s)), [3, 3, 3], [2, 2, 2], [1, 1, 1]), "rows"),
    case(
        aten.max_pool3d_with_indices_backward.default,
        _max_pool_backward(aten.max_pool3d_with_indices.default, _VOLUME, [3, 3, 3], [2, 2, 2], [1, 1, 1]),
        "rows",
    ),
    case(aten.adaptive_max_pool3d.default, lambda s: (x(s, 3, 4, 4, 4), [2, 2, 1])),
    case(aten.adaptive_max_pool3d_backward.default, _adaptive_max_backward),
    case(
        aten.max_unpool2d.default,
        lambda s: (x(s, 3, 2, 2), torch.arange(4).reshape(2, 2).expand(s, 3, 2, 2) * 3, [4, 4]),
    ),
    case(
        aten.max_unpool3d.default,
        lambda s: (
            *(x(s, 3, 2, 2, 2), torch.arange(8).reshape(2, 2, 2).expand(s, 3, 2, 2, 2) * 3),
            *([4, 4, 4], [2, 2, 2], [0, 0, 0]),
        ),
    ),
]

INTERPOLATION = [
    *_multiplied(1, 2),
    *_multiplied(2, 3),
    *_multiplied(3, 2),
    *_resized("upsample_nearest1d", 1),
    *_resized("upsample_linear1d", 1, False),
    *_resized("upsample_bilinear2d", 2, True),
    *_resized("upsample_bicubic2d", 2, False),
    *_resized("upsample_trilinear3d", 3, False),
    *_resized("_upsample_bilinear2d_aa", 2, False),
    *_resized("_upsample_bicubic2d_aa", 2, False),
    *_resized("_upsample_nearest_exact1d", 1),
    *_resized("_upsample_nearest_exact2d", 2),
    case(aten.upsample_nearest2d.vec, lambda s: (x(s, 3, 2, 2), None, [2.0, 2.0])),
    case(aten.grid_sampler_2d.default, lambda s: (x(4, 3, 4, 4), x(4, s, 3, 2), 0, 0, False)),
    case(
        aten.grid_sampler_2d_backward.default,
        lambda s: (x(4, 3, s, 3), x(4, 3, 4, 4), x(4, s, 3, 2), 0, 0, False, [True, True]),
    ),
    case(aten.grid_sampler_3d.default, lambda s: (x(4, 3, 4, 4, 2), x(4, s, 3, 2, 3), 0, 0, False)),
    case(
        aten.grid_sampler_3d_backward.default,
        lambda s: (x(4, 3, s, 3, 2), x(4, 3, 4, 4, 2), x(4, s, 3, 2, 3), 0, 0, False, [True, True]),
    ),
]

BORDERS = [each for name in ("reflection", "replication") for dims in (1, 2, 3) for each in _padded(name, dims)]

REARRANGED = [
    case(aten.pixel_shuffle.default, lambda s: (x(s, 12, 2, 3), 2)),
    case(aten.pixel_unshuffle.default, lambda s: (x(s, 3, 4, 6), 2)),
    case(aten.channel_shuffle.default, lambda s: (x(s, 6, 2, 3), 2)),
    case(aten.im2col.default, lambda s: (x(s, 3, 4, 5), [2, 2], [1, 1], [1, 1], [1, 2])),
    case(aten.col2im.default, lambda s: (x(s, 12, 15), [4, 5], [2, 2], [1, 1], [1, 1], [1, 2])),
]

CASES: list[Case] = [*POOLING, *INTERPOLATION, *BORDERS, *REARRANGED]
