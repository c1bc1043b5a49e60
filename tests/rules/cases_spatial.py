"""Cases of convolutions with halos, and of batch and group norms whose statistics are split."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.rules.case_values import Arguments, Case, case, x

aten = torch.ops.aten


def _convolution(
    shape: Callable[[int], tuple[int, ...]],
    weight: tuple[int, ...],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int = 1,
    transposed: bool = False,
) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        channels = weight[1] * groups if transposed else weight[0]
        return x(*shape(s)), x(*weight), x(channels), stride, padding, dilation, transposed, [0] * len(stride), groups

    return build


def _backward_of(forward: Callable[[int], Arguments], mask: list[bool]) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        value, weight, bias, *options = forward(s)
        out = aten.convolution.default(value, weight, bias, *options)
        return x(*out.shape), value, weight, [bias.shape[0]], *options, mask

    return build


_CONVOLUTIONS = {
    "rows": _convolution(lambda s: (2, 4, s, 4), (6, 4, 3, 3), [1, 1], [1, 1], [1, 1]),
    "rows_and_columns": _convolution(lambda s: (2, 2, s, s + 1), (4, 2, 3, 5), [1, 1], [1, 2], [1, 1]),
    "strided": _convolution(lambda s: (2, 2, 2 * s, 4), (4, 2, 3, 3), [2, 2], [1, 1], [1, 1]),
    "strided_wide": _convolution(lambda s: (1, 2, 2 * s), (4, 2, 7), [2], [3], [1]),
    "even_kernel": _convolution(lambda s: (1, 2, 2 * s), (4, 2, 4), [2], [1], [1]),
    "dilated": _convolution(lambda s: (2, 3, s), (4, 3, 3), [1], [3], [3]),
    "depthwise": _convolution(lambda s: (2, 4, s), (4, 1, 3), [1], [1], [1], groups=4),
    "patches": _convolution(lambda s: (2, 3, 4 * s), (4, 3, 4), [4], [0], [1]),
    "skipping": _convolution(lambda s: (2, 3, 2 * s), (4, 3, 1), [2], [0], [1]),
    "volume": _convolution(lambda s: (1, 2, s, 3, 4), (2, 2, 3, 3, 3), [1, 1, 1], [1, 1, 1], [1, 1, 1]),
    "causal": _convolution(lambda s: (2, 4, s), (4, 1, 4), [1], [3], [1], groups=4),
    "valid": _convolution(lambda s: (1, 2, 2 * s, 3), (2, 2, 4, 1), [1, 1], [0, 0], [1, 1]),
    "unaligned": _convolution(lambda s: (4, 2, s), (4, 2, 3), [1], [0], [1]),
    "transposed_patches": _convolution(lambda s: (2, 3, s), (3, 4, 2), [2], [0], [1], transposed=True),
}
_MASKS = {"volume": [False, True, True], "dilated": [True, False, False]}


def _group_norm(s: int) -> Arguments:
    return x(2, 12, s, 3) + 2, x(12), x(12), 2, 12, 3 * s, 3, 1e-5


def _group_norm_backward(weighted: bool) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        value, weight, bias, *options = _group_norm(s)
        _, mean, rstd = aten.native_group_norm.default(value, weight if weighted else None, bias, *options)
        sizes = options[:4]
        return x(*value.shape), value, mean, rstd, weight if weighted else None, *sizes, [True, weighted, weighted]

    return build


def _batch_norm_backward(s: int) -> Arguments:
    value, weight = x(2, 4, s, 3), x(4)
    out, mean, invstd, *_ = aten._native_batch_norm_legit_functional.default(
        value, weight, x(4), x(4), x(4).abs(), True, 0.1, 1e-5
    )
    return x(*out.shape), value, weight, x(4), x(4).abs(), mean, invstd, True, 1e-5, [True, True, True]


CASES: list[Case] = [
    case(aten.native_group_norm.default, _group_norm, "rows"),
    case(aten.native_group_norm_backward.default, _group_norm_backward(True), "rows"),
    case(aten.native_group_norm_backward.default, _group_norm_backward(False), "rows_without_weight"),
    case(
        aten._native_batch_norm_legit_functional.default,
        lambda s: (x(2, 4, s, 3) + 3, x(4), x(4), x(4), x(4).abs(), True, 0.1, 1e-5),
        "rows",
    ),
    case(
        aten._native_batch_norm_legit_functional.default,
        lambda s: (x(2, 4, s), None, None, x(4), x(4).abs(), False, 0.1, 1e-5),
        "evaluation_rows",
    ),
    case(aten.native_batch_norm_backward.default, _batch_norm_backward, "rows"),
    *[case(aten.convolution.default, build, f"halo_{name}") for name, build in _CONVOLUTIONS.items()],
    *[
        case(
            aten.convolution_backward.default,
            _backward_of(build, _MASKS.get(name, [True, True, True])),
            f"halo_{name}",
        )
        for name, build in _CONVOLUTIONS.items()
    ],
]
