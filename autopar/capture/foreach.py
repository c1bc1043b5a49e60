"""Operators over lists of tensors are taken apart, so that the rules know only operators of single tensors.

_foreach_mul([a, b], 2.0)   -->   [mul(a, 2.0), mul(b, 2.0)]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar._compat import OpOverload

_NAMES = (
    *("abs", "acos", "add", "asin", "atan", "ceil", "clamp_max", "clamp_min", "clone", "cos", "cosh", "div", "erf"),
    *("erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log", "log10", "log1p", "log2", "max", "mul", "neg"),
    *("pow", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "sub", "tan", "tanh", "trunc"),
)


def foreach_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Functional `_foreach` operator -> its single operator applied to every element."""
    singles: dict[str, Callable[..., Any]] = {name: getattr(torch, name) for name in _NAMES}
    singles |= {"addcmul": _addcmul, "addcdiv": _addcdiv, "norm": _norm}
    singles |= {"maximum": torch.clamp_min, "minimum": torch.clamp_max}
    table: dict[OpOverload, Callable[..., Any]] = {}
    for name, single in singles.items():
        packet = getattr(torch.ops.aten, f"_foreach_{name}", None)
        for overload in packet.overloads() if packet is not None else ():  # torch 2.11 has no clone
            if "out" not in overload and not (name.startswith("addc") and overload == "Tensor"):
                table[getattr(packet, overload)] = _for_each(single)
    return table


def _addcmul(x: Tensor, left: Tensor, right: Tensor, value: float = 1) -> Tensor:
    return torch.addcmul(x, left, right, value=value)


def _addcdiv(x: Tensor, left: Tensor, right: Tensor, value: float = 1) -> Tensor:
    return torch.addcdiv(x, left, right, value=value)


def _norm(x: Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, ord, dtype=dtype)
    return length


def _for_each(single: Callable[..., Any]) -> Callable[..., Any]:
    """`single` for every element: lists (of tensors or numbers) are walked together, other arguments are repeated."""

    def decomposed(*args: Any, **kwargs: Any) -> list[Any]:
        count = len(next(value for value in args if isinstance(value, list | tuple)))
        return [single(*[_element(value, i) for value in args], **kwargs) for i in range(count)]

    return decomposed


def _element(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list | tuple) else value
