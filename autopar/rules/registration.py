"""Rules of users: one string per operator, refused unless executing it on small random tensors proves it.

    register_rule("mylib::scaled_mm", "m k, k n -> m n")

Every name is split over 2 and 3 ranks: operands are cut, the operator runs on the blocks, results are concatenated,
summed or reduced as the string says and compared with the plain result. So a string that is too bold never shapes a
plan. Operators whose arguments cannot be made up (attributes without default, integer tensors) need `example`.
Custom operators of `torch.library` and Triton kernels wrapped in one come through this door; `autopar rules discover`
proposes strings for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import ConfigurationError
from autopar.rules.binding import bind_rule
from autopar.rules.engine import add_rule
from autopar.rules.language import Factor, Pattern, TensorPattern, parse_pattern
from autopar.rules.proof import BLOCK_ERRORS, call_for, prove_rule, run_operator

_SIZE = 6
_ELLIPSIS = (_SIZE, 12)


def register_rule(name: str, text: str, example: Sequence[Any] | None = None) -> None:
    """Give the operator `name` ("lib::op" or "lib::op.overload") the rule `text`, after proving it by execution.

    example: positional arguments with which to prove it; without, random tensors as the string describes them.
    Raises ConfigurationError for an unknown operator, a string that does not parse, an example that cannot be made
    up or does not run, and a split whose result differs from the plain operator's.
    """
    target = find_operator(name)
    pattern = refuse_implementations(text, name)
    arguments = tuple(example) if example is not None else _made_up_arguments(target, pattern)
    try:
        results = run_operator(target, arguments)
    except BLOCK_ERRORS as error:
        raise ConfigurationError(
            f"{name} does not run on the example that {'was given' if example is not None else 'the rule describes'}: "
            f"{error}; pass example=(arguments)"
        ) from error
    prove_rule(target, arguments, results, bind_rule(text, call_for(target, arguments, results)), text)
    add_rule(str(target), text)


def refuse_implementations(text: str, name: str) -> Pattern:
    """The rule read. Raises ConfigurationError where it does not parse, or names an implementation of ours."""
    pattern = parse_pattern(text)
    if any(effect.implementation for effect in (*pattern.effects.values(), pattern.reduce_effect)):
        raise ConfigurationError(f"rule {text!r} of {name}: implementations belong to autopar's own operators")
    return pattern


def find_operator(name: str) -> Any:
    """The operator "lib::op" (its default overload) or "lib::op.overload". Raises ConfigurationError for others."""
    namespace, _, rest = name.replace("::", ".", 1).partition(".")
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
