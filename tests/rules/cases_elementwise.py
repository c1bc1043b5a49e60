"""Cases of elementwise operators that torch does not tag as pointwise, of complex and of quantised numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ops import gated  # noqa: F401 (it is registered)
from tests.rules.case_values import Case, case, ids, x

aten = torch.ops.aten


def z(*shape: int) -> Tensor:
    """Distinct complex values."""
    return torch.randn(shape, dtype=torch.complex128)


def _scales(size: int) -> Tensor:
    return torch.arange(1, size + 1, dtype=torch.float32) / 8


BACKWARD = [
    case(aten.elu_backward.default, lambda s: (x(s, 4), 1.5, 1.0, 1.0, False, x(s, 4))),
    case(aten.leaky_relu_backward.default, lambda s: (x(s, 4), x(s, 4), 0.1, False)),
    case(aten.hardswish.default, lambda s: (x(s, 4) * 4,)),
    case(aten.hardswish_backward.default, lambda s: (x(s, 4), x(s, 4) * 4)),
    case(aten.mish_backward.default, lambda s: (x(s, 4), x(s, 4) * 4)),
    case(aten.hardsigmoid_backward.default, lambda s: (x(s, 4), x(s, 4) * 4)),
    case(aten.hardtanh_backward.default, lambda s: (x(s, 4), x(s, 4), -1.0, 1.0)),
    case(aten.hardshrink_backward.default, lambda s: (x(s, 4), x(s, 4), 0.5)),
    case(aten.softshrink_backward.default, lambda s: (x(s, 4), x(s, 4), 0.5)),
    case(aten.log_sigmoid_backward.default, lambda s: (x(s, 4), *_with_exponential(x(s, 4)))),
    case(aten.rrelu_with_noise_backward.default, lambda s: (x(s, 4), x(s, 4), x(s, 4), 0.1, 0.3, True, False)),
    case(aten._prelu_kernel.default, lambda s: (x(3, s, 4), x(s, 1))),
    case(aten._prelu_kernel_backward.default, lambda s: (x(3, s, 4), x(3, s, 4), x(s, 1))),
    case(aten.rsub.Tensor, lambda s: (x(s, 4), x(4)), alpha=-2),
    case(torch.ops.autopar.gated.default, lambda s: (x(s, 4), x(s, 4), "silu")),
    case(torch.ops.autopar.gated_backward.default, lambda s: (x(s, 4), x(s, 4), x(s, 4), "gelu_tanh")),
]


def _with_exponential(values: Tensor) -> tuple[Tensor, Tensor]:
    return values, (-values.abs()).exp()


COMPLEX = [
    case(aten.complex.default, lambda s: (x(s, 4), x(s, 4))),
    case(aten.polar.default, lambda s: (x(s, 4), x(s, 4))),
    case(aten.view_as_complex.default, lambda s: (x(s, 3, 2),)),
    case(aten.view_as_real.default, lambda s: (z(s, 3),)),
    case(aten._conj.default, lambda s: (z(s, 3),)),
    case(aten._neg_view.default, lambda s: (x(s, 3),)),
    case(aten.mul.Tensor, lambda s: (z(s, 3), z(3)), "complex"),
    case(aten.angle.default, lambda s: (z(s, 3),)),
    case(aten._fft_r2c.default, lambda s: (x(s, 6, 5), [1], 0, True)),
    case(aten._fft_c2r.default, lambda s: (z(s, 4, 5), [1], 2, 6)),
    case(aten._fft_c2c.default, lambda s: (z(s, 6, 5), [1, 2], 0, False)),
]

QUANTISED = [
    case(aten.fake_quantize_per_tensor_affine_cachemask.default, lambda s: (x(s, 4).float(), 0.1, 3, -8, 7)),
    case(
        aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
        lambda s: (x(s, 4).float(), torch.tensor([0.1]), torch.tensor([3]), torch.tensor([1]), -8, 7),
    ),
    case(
        aten.fake_quantize_per_channel_affine_cachemask.default,
        lambda s: (x(s, 4, 3).float(), _scales(4), torch.arange(4, dtype=torch.int32), 1, -8, 7),
    ),
]

OTHERS = [
    case(aten.isin.Tensor_Tensor, lambda s: (ids(9, s, 4), ids(9, 3))),
    case(aten.isin.Tensor_Scalar, lambda s: (ids(3, s, 4), 1)),
    case(aten.isin.Scalar_Tensor, lambda s: (1, ids(9, s))),
    case(aten.view.dtype, lambda s: (x(s, 4), torch.int32)),
]

CASES: list[Case] = [*BACKWARD, *COMPLEX, *QUANTISED, *OTHERS]
