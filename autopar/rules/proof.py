"""Proof of a rule by executing the operator itself: cut the operands, run the blocks, put the results together.

    mm "m k, k n -> m n", k in 2 parts     a[:, :3] @ b[:3] + a[:, 3:] @ b[3:]  ==  a @ b

Rules that users register, and rules that `discovery` proposes, pass through here. Implementations (masked lookups,
halos) belong to autopar's own operators, whose proof is in its tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import ConfigurationError
from autopar.rules.call import Call, TensorSpec
from autopar.rules.rule import Rule
from autopar.rules.rule import Tensor as Dims

NUM_PARTS = (2, 3)
TOLERANCE = 1e-4
BLOCK_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)
"""What an operator raises for blocks that it does not take."""


def run_operator(target: Any, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Results of one call, always as a tuple."""
    result = target(*arguments)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def call_for(target: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Call:
    """The `Call` that binds a rule to these arguments."""

    def frozen(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple(frozen(item) for item in value)
        return TensorSpec(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value

    outputs = tuple(frozen(result) if isinstance(result, Tensor) else None for result in results)
    return Call(target, frozen(arguments), (), outputs)


def prove_rule(
    target: Any, arguments: tuple[Any, ...], results: tuple[Any, ...], rule: Rule, text: str, *, is_wide: bool = False
) -> None:
    """Raises ConfigurationError unless every split, in 2 and 3 parts, and every linear pattern of the rule holds.
    is_wide: as of `equal_values`."""
    for name in rule.names:
        for num_parts in NUM_PARTS:
            if rule.sizes[name] % num_parts == 0:
                _prove_split(target, arguments, results, rule, name, num_parts, text, is_wide)
    for marks in rule.linear:
        if not is_linear(target, arguments, results, marks, is_wide=is_wide):
            raise ConfigurationError(
                f"rule {text!r} of {target} is wrong: it is not linear in the operands marked x ({_marks(marks)})"
            )


def _marks(marks: Sequence[bool]) -> str:
    return " ".join("x" if mark else "-" for mark in marks)


def is_linear(
    target: Any,
    arguments: tuple[Any, ...],
    results: tuple[Any, ...],
    marks: Sequence[bool],
    *,
    is_wide: bool = False,
) -> bool:
    """Whether summands of the marked operands give summands of the results: multiples of the operands, and parts drawn
    at random, since x * y / z passes multiples on and is not linear in the three."""
    leaves, spec = pytree.tree_flatten(arguments)
    expected = [result for result in results if isinstance(result, Tensor)]
    for cut in (_multiples, _drawn_parts):
        mark = iter(marks)
        pairs = [cut(x) if isinstance(x, Tensor) and next(mark) else (x, x) for x in leaves]
        one, other = (
            [v for v in run_operator(target, pytree.tree_unflatten(local, spec)) if isinstance(v, Tensor)]
            for local in ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        )
        if not all(equal_values(a + b, whole, is_wide) for a, b, whole in zip(one, other, expected, strict=True)):
            return False
    return True


def _multiples(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 3.0, x * -2.0


def _drawn_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(x.numel())
    part = torch.randn(x.shape, generator=generator, dtype=x.dtype if x.is_complex() else torch.float32).to(x)
    return part, x - part


def equal_values(found: Tensor, expected: Tensor, is_wide: bool = False) -> bool:
    """Whether two tensors agree in shape and values; NaN equals NaN. is_wide: values are finite and may be large, and
    agree where they differ by a ten thousandth of the largest."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    largest = float(expected.abs().max()) if is_wide and expected.dtype != torch.bool and expected.numel() else 1.0
    return bool(torch.allclose(found, expected, TOLERANCE, TOLERANCE * max(largest, 1.0), equal_nan=True))


def block_of(x: Tensor, dim: int, outer: int, num_parts: int, part: int) -> Tensor:
    """One of `num_parts` blocks of a dim, seen as (outer, rest), along the rest: in memory of its own, so that no
    operator reads the other blocks behind it."""
    seen = _unflattened(x, dim, (outer, num_parts, -1))
    return seen.select(dim + 1, part).flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)


def _prove_split(
    target: Any,
    arguments: tuple[Any, ...],
    results: tuple[Any, ...],
    rule: Rule,
    name: str,
    num_parts: int,
    text: str,
    is_wide: bool,
) -> None:
    leaves, spec = pytree.tree_flatten(arguments)
    parts = []
    for part in range(num_parts):
        dims = iter(rule.inputs)
        local = [_block(x, next(dims), name, rule, num_parts, part) if isinstance(x, Tensor) else x for x in leaves]
        try:
            parts.append(run_operator(target, pytree.tree_unflatten(local, spec)))
        except BLOCK_ERRORS as error:
            raise _refusal(target, text, name, num_parts, f"it fails on blocks: {error}") from error
    for index, (expected, output) in enumerate(zip(results, rule.outputs, strict=True)):
        if output is None:
            continue
        found = _reassembled([part[index] for part in parts], output, name, rule, index)
        if not equal_values(found, expected, is_wide):
            raise _refusal(target, text, name, num_parts, f"output {index} differs from the plain operator's")


def _refusal(target: Any, text: str, name: str, num_parts: int, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"rule {text!r} of {target} is wrong: with {name!r} split in {num_parts}, {reason};"
        f" write [{name}] to keep it whole"
    )


def _split_dim(tensor: Dims, name: str, rule: Rule) -> tuple[int, int] | None:
    """(dim, product of the factors outside of the name), or None if the tensor has not the name."""
    for dim, factors in enumerate(tensor):
        if name in factors:
            outer = factors[: factors.index(name)]
            return dim, math.prod(rule.sizes[factor] for factor in outer if factor is not None)
    return None


def _block(x: Tensor, tensor: Dims, name: str, rule: Rule, num_parts: int, part: int) -> Tensor:
    place = _split_dim(tensor, name, rule)
    return x if place is None else block_of(x, *place, num_parts, part)


def _reassembled(blocks: list[Tensor], tensor: Dims, name: str, rule: Rule, output: int) -> Tensor:
    place = _split_dim(tensor, name, rule)
    if place is not None:
        dim, outer = place
        pieces = [_unflattened(block, dim, (outer, -1)) for block in blocks]
        return torch.cat(pieces, dim + 1).flatten(dim, dim + 1)
    op = rule.reductions[name][output]
    stacked = torch.stack(blocks)
    if op is None:
        return blocks[-1]
    if op == "sum":
        return stacked.sum(0)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _unflattened(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])
