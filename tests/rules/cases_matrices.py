"""Cases of products, distances, linear algebra and of operators with weights of a norm: batches are split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops import tiled_mlp  # noqa: F401 (it is registered)
from tests.rules.case_values import Arguments, Case, case, x

aten, ours = torch.ops.aten, torch.ops.autopar


def definite(*shape: int) -> Tensor:
    """Symmetric positive definite matrices with distinct eigenvalues."""
    half = x(*shape, shape[-1])
    spread = torch.diag(torch.arange(1.0, shape[-1] + 1, dtype=torch.float64))
    return half @ half.mT + 2 * spread


def _triangular(*shape: int) -> Tensor:
    return torch.linalg.cholesky(definite(*shape))


def _lu(s: int) -> tuple[Any, ...]:
    return tuple(aten.linalg_lu_factor_ex.default(definite(s, 3))[:2])


def _ldl(s: int) -> tuple[Any, ...]:
    return tuple(aten.linalg_ldl_factor_ex.default(definite(s, 3))[:2])


def _qr(s: int) -> tuple[Any, ...]:
    return tuple(aten.geqrf.default(x(s, 4, 3)))


def _mlp(s: int, inputs: int, biased: bool, columns: bool) -> Arguments:
    """x, weights, biases and the last weight of an MLP with s hidden activations."""
    into, behind = ((4, s), (s, 5)) if columns else ((s, 4), (5, s))
    return x(6, 4), [x(*into) for _ in range(inputs)], [x(s) for _ in range(inputs if biased else 0)], x(*behind)


def _mlp_case(activation: str, inputs: int, biased: bool, columns: bool, label: str) -> list[Case]:
    """Forward and backward."""
    rest = (activation, columns)
    return [
        case(ours.tiled_mlp.default, lambda s: (*_mlp(s, inputs, biased, columns), *rest), label),
        case(ours.tiled_mlp_backward.default, lambda s: (x(6, 5), *_mlp(s, inputs, biased, columns), *rest), label),
    ]


def exact_in_float8(*shape: int) -> Tensor:
    """1.75 times powers of two: every block has a scale that is a power of two, and rounding to float8 changes
    nothing, so products of any blocks are exact."""
    sign = torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)
    return 1.75 * sign * 2.0 ** -torch.randint(4, shape).float()


PRODUCTS = [
    case(torch.ops.autopar.mm_fp8_rowwise.default, lambda s: (exact_in_float8(s, 12), exact_in_float8(12, s))),
    case(torch.ops.autopar.mm_fp8_rowwise.default, lambda s: (exact_in_float8(8, s), exact_in_float8(s, 24)), "inner"),
    case(torch.ops.autopar.mm_fp8_tensorwise.default, lambda s: (exact_in_float8(s, 12), exact_in_float8(12, s))),
    case(aten._cdist_forward.default, lambda s: (x(s, 4, 3), x(s, 5, 3), 2.0, None)),
    case(aten._cdist_forward.default, lambda s: (x(4, 3), x(s, 3), 1.0, None), "columns"),
    case(aten._cdist_backward.default, lambda s: _distances(s)),
    case(aten._pdist_forward.default, lambda s: (x(s, 3),)),
    case(aten._pdist_backward.default, lambda s: _pairs(s)),
    case(aten._trilinear.default, lambda s: (x(s, 3), x(5, 3, 4), x(s, 4), [1, 3], [0], [1, 2], [2, 3])),
    case(aten._weight_norm_interface.default, lambda s: (x(s, 4, 3), x(s, 1, 1), 0)),
    case(aten._weight_norm_interface.default, lambda s: (x(4, 3, s), x(1, 1, s), 2), "last"),
    case(aten._weight_norm_interface_backward.default, lambda s: _weight_norm(s)),
]


def _distances(s: int) -> Arguments:
    left, right = x(s, 4, 3), x(s, 6, 3)
    return x(s, 4, 6), left, right, 2.0, torch.cdist(left, right)


def _pairs(s: int) -> Arguments:
    points = x(s, 3)
    distances = torch.pdist(points)
    return x(*distances.shape), points, 2.0, distances


def _weight_norm(s: int) -> Arguments:
    v, g = x(s, 4, 3), x(s, 1, 1)
    return x(s, 4, 3), v, g, aten._weight_norm_interface.default(v, g, 0)[1], 0


FACTORISATIONS = [
    case(aten.linalg_inv_ex.default, lambda s: (definite(s, 3),)),
    case(aten.linalg_cholesky_ex.default, lambda s: (definite(s, 3),)),
    case(aten.cholesky.default, lambda s: (definite(s, 3),)),
    case(aten.linalg_qr.default, lambda s: (x(s, 4, 3),)),
    case(aten.geqrf.default, lambda s: (x(s, 4, 3),)),
    case(aten.linalg_householder_product.default, lambda s: _qr(s)),
    case(aten.ormqr.default, lambda s: (*_qr(s), x(s, 4, 2))),
    case(aten._linalg_svd.default, lambda s: (x(s, 4, 3),)),
    case(aten._linalg_eigh.default, lambda s: (definite(s, 3),)),
    case(aten.linalg_eig.default, lambda s: (x(s, 3, 3),)),
    case(aten._linalg_eigvals.default, lambda s: (x(s, 3, 3),)),
    case(aten._linalg_det.default, lambda s: (x(s, 3, 3),)),
    case(aten._linalg_slogdet.default, lambda s: (x(s, 3, 3),)),
    case(aten.linalg_matrix_exp.default, lambda s: (x(s, 3, 3),)),
    case(aten.linalg_lu.default, lambda s: (x(s, 3, 3),)),
    case(aten.linalg_lu_factor_ex.default, lambda s: (x(s, 3, 3),)),
    case(aten.lu_unpack.default, lambda s: _lu(s)),
    case(aten.linalg_ldl_factor_ex.default, lambda s: (definite(s, 3),)),
]

SOLVERS = [
    case(aten._linalg_solve_ex.default, lambda s: (definite(s, 3), x(s, 3, 2))),
    case(aten._linalg_solve_ex.default, lambda s: (definite(s, 3), x(s, 3)), "vectors"),
    case(aten.cholesky_solve.default, lambda s: (x(s, 3, 2), _triangular(s, 3))),
    case(aten.cholesky_inverse.default, lambda s: (_triangular(s, 3),)),
    case(aten.linalg_lu_solve.default, lambda s: (*_lu(s), x(s, 3, 2))),
    case(aten.linalg_ldl_solve.default, lambda s: (*_ldl(s), x(s, 3, 2))),
    case(aten.linalg_solve_triangular.default, lambda s: (_triangular(s, 3), x(s, 3, 2)), upper=False),
    case(aten.triangular_solve.default, lambda s: (x(s, 3, 2), _triangular(s, 3), False)),
    case(aten.linalg_pinv.atol_rtol_tensor, lambda s: (x(s, 4, 3),)),
    case(aten.linalg_cross.default, lambda s: (x(s, 3), x(s, 3))),
]

MLPS = [
    *_mlp_case("silu", 2, False, False, "gated"),
    *_mlp_case("gelu_tanh", 2, True, True, "gated with biases, columns"),
    *_mlp_case("gelu", 1, True, False, "plain with bias"),
    *_mlp_case("relu", 1, False, True, "plain, columns"),
]

CASES: list[Case] = [*PRODUCTS, *FACTORISATIONS, *SOLVERS, *MLPS]
