"""Examples of a captured call: the same call at sizes that run in a moment, with values made up.

    scale(f32[8192, 4096], f32[4096], 3)   ->   scale(f32[12, 6], f32[6], 3)   and   scale(f32[18, 12], f32[12], 3)

What an operator does may depend on which sizes are equal, on their order, and on how they compare with its integers
(`tril(x, 100)` is the identity for 64 rows and not for 128). So equal sizes stay equal, sizes keep their order, an
integer that is a size follows it, and sizes up to the largest other integer stay as they are while all others stay
above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autopar.rules.call import Call, TensorSpec

Scale: TypeAlias = Mapping[int, int]
"""Size of the call -> size of the example; the other sizes stay."""

MOST_ELEMENTS = 1 << 20
"""Of all operands of an example together."""
MOST_OWN_ELEMENTS = 1 << 16
"""Of all operands of a call that is tried at its own sizes."""
SMALL = 8
"""Sizes up to this one may have a meaning of their own: colours, the sides of a kernel."""
WIDE = 1e4
"""Of values that show bounds inside of an operator."""
MOST_WIDE = 1e15
_PARTS = 6  # sizes that 2 and 3 divide can be cut
_MOST_UNIT = 96
_SINGLE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True, slots=True)
class PositionalOperator:
    """An operator that takes its keyword arguments behind the others. names: of those."""

    target: Any
    names: tuple[str, ...]

    def __call__(self, *values: Any) -> Any:
        """The results of the operator."""
        first = len(values) - len(self.names)
        return self.target(*values[:first], **dict(zip(self.names, values[first:], strict=True)))

    def __str__(self) -> str:
        return str(self.target)

    @property
    def tags(self) -> Any:
        """Those of the operator."""
        return self.target.tags

    @property
    def _schema(self) -> Any:
        return self.target._schema


def positional(call: Call) -> PositionalOperator:
    """The operator of `call`, to be run with the arguments of `example_of`."""
    return PositionalOperator(call.target, tuple(name for name, _ in call.kwargs))


def scales(call: Call) -> Iterator[tuple[Scale, Scale]]:
    """Two scales each, the likely ones first: one to look for a rule, one to prove it at other sizes. The last pair is
    the call as it is, where that is small."""
    sizes = sorted({size for spec in call.operands for size in spec.shape if size > 1})
    integers = [abs(i) for i in _integers((call.args, tuple(value for _, value in call.kwargs)))]
    others = [i for i in integers if i not in sizes]
    tried: list[tuple[Scale, Scale]] = []
    for least, fixed in ((1, others), (SMALL, others), (1, integers)):
        pair = _scaled(sizes, max((least, *fixed)), fixed)
        if pair[0] and pair not in tried and _elements(call, pair[1]) <= MOST_ELEMENTS:
            tried.append(pair)
            yield pair
    if _elements(call, {}) <= MOST_OWN_ELEMENTS:
        yield {}, {}


def _scaled(sizes: list[int], kept: int, fixed: list[int]) -> tuple[Scale, Scale]:
    """Sizes above `kept`, in their order, as multiples of what an integer may divide them by."""
    unit = _PARTS * math.lcm(*(i for i in fixed if 1 < i <= 2 * SMALL))
    unit = unit if unit <= _MOST_UNIT else _PARTS
    first = kept // unit + 1
    moved = [size for size in sizes if size > kept]
    low, high = ({size: unit * (first + place + more) for place, size in enumerate(moved)} for more in (0, 1))
    return low, high


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, tuple):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _elements(call: Call, scale: Scale) -> int:
    return sum(math.prod(scale.get(size, size) for size in spec.shape) for spec in call.operands)


def spread_beyond(call: Call) -> float:
    """Values so large lie on both sides of every number of the call: of a bound, or of a value that is filled in."""
    numbers = [abs(n) for n in _numbers((call.args, tuple(value for _, value in call.kwargs))) if math.isfinite(n)]
    return min(max([WIDE, *(4.0 * n for n in numbers)]), MOST_WIDE)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def example_of(call: Call, scale: Scale, seed: int, spread: float = 1.0) -> tuple[Any, ...]:
    """Arguments for `positional(call)`: floats are distinct and of both signs, `spread` large, integers below every
    size. Half precision becomes fp32, whose sums can be compared."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [[scale.get(size, size) for size in spec.shape] for spec in call.operands]
    limit = min((size for shape in shapes for size in shape if size > 1), default=2)

    def made(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            shape = tuple(scale.get(size, size) for size in value.shape)
            drawn = _drawn(shape, _SINGLE.get(value.dtype, value.dtype), limit, generator)
            return drawn * spread if drawn.is_floating_point() or drawn.is_complex() else drawn
        if isinstance(value, tuple):
            return [made(item) for item in value]
        if isinstance(value, int) and not isinstance(value, bool):
            return scale.get(value, value)
        return value

    return (*map(made, call.args), *(made(value) for _, value in call.kwargs))


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, limit: int, generator: torch.Generator) -> Tensor:
    if dtype.is_complex:
        parts = [_normal(shape, generator) for _ in range(2)]
        return torch.complex(*parts).to(dtype)
    if dtype.is_floating_point:
        return _normal(shape, generator).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator, device="cpu") < 0.5
    return torch.randint(0, limit, shape, generator=generator, dtype=dtype, device="cpu")


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal values in fp64, one of each quantile, so that they stay distinct in fp32."""
    count = math.prod(shape)
    order = torch.randperm(count, generator=generator, device="cpu")
    within = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu") / 2 + 0.25
    values: Tensor = torch.special.ndtri((order + within) / count)
    return values.reshape(shape)


def is_the_same_call(call: Call, scale: Scale, results: tuple[Any, ...]) -> bool:
    """Whether the results of the example are those of the call at its scale: sizes that differ there differ here."""
    seen = {size: scale.get(size, size) for spec in call.operands for size in spec.shape}
    if len(results) != len(call.outputs):
        return False
    for spec, result in zip(call.outputs, results, strict=True):
        if (spec is None) == isinstance(result, Tensor):
            return False
        if spec is not None and not _is_scaled(spec, result, seen):
            return False
    return len(set(seen.values())) == len(seen)


def _is_scaled(spec: TensorSpec, result: Tensor, seen: dict[int, int]) -> bool:
    """seen: size of the call -> size of the example, which sizes that only results have join."""
    if result.dtype not in (spec.dtype, _SINGLE.get(spec.dtype)) or result.dim() != len(spec.shape):
        return False
    return all(seen.setdefault(size, found) == found for size, found in zip(spec.shape, result.shape, strict=True))
