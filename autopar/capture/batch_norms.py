"""One spelling of batch norm: torch's variants become `_native_batch_norm_legit_functional` and its one backward.

    _batch_norm_with_update(x, w, b, mean, var, 0.1, eps)  -->  _native_batch_norm_legit_functional(..., True, 0.1, eps)

torch itself opens `cudnn_batch_norm` and the in-place forms so. The reserve that newer variants return is the scratch
memory of a GPU kernel; nothing reads it here, and it is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _no_training(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return _functional(x, weight, bias, mean, var, False, momentum, eps)[:3]


def _no_update(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return *_functional(x, weight, bias, mean, var, False, momentum, eps)[:3], _reserve(x)


def _with_update(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    out, save_mean, save_invstd, *running = _functional(x, weight, bias, mean, var, True, momentum, eps)
    return out, save_mean, save_invstd, _reserve(x), *running


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    update: bool,
    eps: float,
    wanted: Sequence[bool],
    reserve: Tensor,
) -> Any:
    return _aten.native_batch_norm_backward.default(
        grad, x, weight, mean, var, save_mean, save_invstd, update, eps, wanted
    )


def _functional(*arguments: Any) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = _aten._native_batch_norm_legit_functional.default(*arguments)
    return results


def _reserve(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.uint8)


BATCH_NORMS: Mapping[Any, Callable[..., Any]] = {
    _aten._native_batch_norm_legit_no_training.default: _no_training,
    _aten._batch_norm_no_update.default: _no_update,
    _aten._batch_norm_with_update_functional.default: _with_update,
    _aten.batch_norm_backward.default: _backward,
}
