"""Rules of users: one string per operator, refused unless executing it on small random tensors proves it.

    register_rule("mylib::scaled_mm", "m k, k n -> m n")

Every name is split over 2 and 3 ranks: operands are cut, the operator runs on the blocks, results are concatenated,
summed or reduced as the string says and compared with the plain result. So a string that is too bold never shapes a
plan. Operators whose arguments cannot be made up (attributes without default, integer tensors) need `example`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import ConfigurationError
from autopar.rules.binding import bind_rule
from autopar.rules.call import Call, TensorSpec
from autopar.rules.engine import add_rule
from autopar.rules.language import Factor, Pattern, TensorPattern, parse_pattern
from autopar.rules.rule import Rule
from autopar.rules.rule import Tensor as Dims

_NUM_PARTS = (2, 3)
_SIZE = 6
_ELLIPSIS = (_SIZE, 12)
_TOLERANCE = 1e-4


def register_rule(name: str, text: str, example: Sequence[Any] | None = None) -> None:
    """Give the operator `name` ("lib::op" or "lib::op.overload") the rule `text`, after proving it by execution.

    example: positional arguments with which to prove it; without, random tensors as the string describes them.
    Raises ConfigurationError for an unknown operator, a string that does not parse, an example that cannot be made
    up, and a split whose result differs from the plain operator's.
    """
    target = _find_operator(name)
    pattern = parse_pattern(text)
    if any(effect.implementation for effect in (*pattern.effects.values(), pattern.reduce_effect)):
        raise ConfigurationError(f"rule {text!r} of {name}: implementations belong to autopar's own operators")
    arguments = tuple(example) if example is not None else _made_up_arguments(target, pattern)
    results = _run(target, arguments)
    rule = bind_rule(text, _call(target, arguments, results))
    for split_name in rule.names:
        for num_parts in _NUM_PARTS:
            if rule.sizes[split_name] % num_parts == 0:
                _prove_split(target, arguments, results, rule, split_name, num_parts, text)
    for marks in rule.linear:
        _prove_linear(target, arguments, results, marks, text)
    add_rule(str(target), text)


def _find_operator(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")
    except AttributeError as error:
        raise ConfigurationError(f"there is no operator {name!r}; write library::operator[.overload]") from error


def _made_up_arguments(target: Any, pattern: Pattern) -> tuple[Any, ...]:
    """Random signed tensors for the operands; attributes take their defaults."""
    patterns = iter(pattern.operands)
    arguments: list[Any] = []
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only or (argument.has_default_value() and "Tensor" not in kind):
            break
        described = next(patterns, None) if kind in ("Tensor", "Optional[Tensor]") else None
        if described is None:
            raise ConfigurationError(
                f"cannot make up the argument {argument.name!r} ({kind}) of {target}; pass example=(arguments)"
            )
        arguments.append(torch.randn(_made_up_shape(described, pattern)))
    return tuple(arguments)


def _made_up_shape(described: TensorPattern, pattern: Pattern) -> tuple[int, ...]:
    def size(dim: tuple[Factor, ...]) -> int:
        return math.prod(pattern.sizes.get(f.name or "", _SIZE) for f in dim)

    before = tuple(size(dim) for dim in described.before)
    if described.after is None:
        return before
    return before + _ELLIPSIS + tuple(size(dim) for dim in described.after)


def _run(target: Any, arguments: Sequence[Any]) -> tuple[Any, ...]:
    result = target(*arguments)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _call(target: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Call:
    def frozen(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple(frozen(item) for item in value)
        return TensorSpec(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value

    outputs = tuple(frozen(result) if isinstance(result, Tensor) else None for result in results)
    return Call(target, frozen(arguments), (), outputs)


def _prove_split(
    target: Any,
    arguments: tuple[Any, ...],
    results: tuple[Any, ...],
    rule: Rule,
    name: str,
    num_parts: int,
    text: str,
) -> None:
    """Raises ConfigurationError unless the blocks of all parts reassemble to the plain results."""
    leaves, spec = pytree.tree_flatten(arguments)
    parts = []
    for part in range(num_parts):
        dims = iter(rule.inputs)
        local = [_block(x, next(dims), name, rule, num_parts, part) if isinstance(x, Tensor) else x for x in leaves]
        try:
            parts.append(_run(target, pytree.tree_unflatten(local, spec)))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise _refusal(target, text, name, num_parts, f"it fails on blocks: {error}") from error
    for index, (expected, output) in enumerate(zip(results, rule.outputs, strict=True)):
        if output is None:
            continue
        blocks = [part[index] for part in parts]
        found = _reassembled(blocks, output, name, rule, index)
        if found.shape != expected.shape or not torch.allclose(found, expected, _TOLERANCE, _TOLERANCE, equal_nan=True):
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
    if place is None:
        return x
    dim, outer = place
    seen = _unflattened(x, dim, (outer, num_parts, -1))
    return seen.select(dim + 1, part).flatten(dim, dim + 1).contiguous()


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


def _prove_linear(
    target: Any, arguments: tuple[Any, ...], results: tuple[Any, ...], marks: Sequence[bool], text: str
) -> None:
    """Raises ConfigurationError unless summands of the marked operands give summands of the results."""
    leaves, spec = pytree.tree_flatten(arguments)
    total: list[Tensor] | None = None
    for weight in (3.0, -2.0):
        mark = iter(marks)
        local = [x * weight if isinstance(x, Tensor) and next(mark) else x for x in leaves]
        values = [value for value in _run(target, pytree.tree_unflatten(local, spec)) if isinstance(value, Tensor)]
        total = values if total is None else [a + b for a, b in zip(total, values, strict=True)]
    expected = [result for result in results if isinstance(result, Tensor)]
    if not all(torch.allclose(a, b, _TOLERANCE, _TOLERANCE) for a, b in zip(total or [], expected, strict=True)):
        raise ConfigurationError(f"rule {text!r} of {target} is wrong: it is not linear in the operands marked x")
