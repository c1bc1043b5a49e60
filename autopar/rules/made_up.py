"""Examples made up for an operator: random tensors of small shapes with which it runs.

    made_up_example(torch.ops.aten.mm.default)   ->   (randn(6, 12), randn(12, 18))

Shapes are tried in a child process, the likely ones first, since a kernel may crash on shapes that it does not expect.
Attributes take their defaults, or a small value where they have none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import ConfigurationError
from autopar.rules.child_process import run_in_child
from autopar.rules.proof import BLOCK_ERRORS, run_operator

SHAPES = ((6, 12), (12, 18), (12,), (6, 12, 18), (6, 18, 24), (6,), (6, 12, 18, 4))
MAX_EXAMPLES = 2500
_VALUES: dict[str, Any] = {"int": 1, "float": 0.5, "bool": False, "List[int]": [1], "List[bool]": [True]}


def made_up_example(target: Any) -> tuple[Any, ...]:
    """Positional arguments of `target`. Raises ConfigurationError where none of the shapes fits."""
    required = [a for a in target._schema.arguments if not a.kwarg_only and not a.has_default_value()]
    kinds = [str(argument.type) for argument in required]
    unknown = [a.name for a, kind in zip(required, kinds, strict=True) if kind != "Tensor" and kind not in _VALUES]
    count = kinds.count("Tensor")
    if unknown or not count or len(SHAPES) ** count > MAX_EXAMPLES:
        raise _refusal(target, f"the argument {unknown[0]!r}" if unknown else f"{count} tensors")
    choices = sorted(itertools.product(range(len(SHAPES)), repeat=count), key=lambda choice: (max(choice), choice))
    runs, _ = run_in_child(lambda index: _runs(target, _arguments(kinds, choices[index])), len(choices), until=True)
    if not runs or runs[-1] is not True:
        raise _refusal(target, "shapes with which it runs")
    return _arguments(kinds, choices[len(runs) - 1])


def _arguments(kinds: Sequence[str], choice: Sequence[int]) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = iter(choice)
    return tuple(
        torch.randn(SHAPES[next(shapes)], generator=generator) if kind == "Tensor" else _VALUES[kind] for kind in kinds
    )


def _runs(target: Any, arguments: tuple[Any, ...]) -> bool:
    try:
        results = run_operator(target, arguments)
    except BLOCK_ERRORS:
        return False
    return any(isinstance(result, Tensor) for result in results)


def _refusal(target: Any, what: str) -> ConfigurationError:
    return ConfigurationError(f"cannot make up {what} for {target}; give an example (--example 'randn(6, 12), [1]')")
