"""Binding: a parsed rule string meets the shapes of one call and becomes a `Rule`.

    "m k, k n -> m n"  +  [4, 6] x [6, 8] -> [4, 8]   -->   Rule(sizes={"m": 4, "k": 6, "n": 8}, reductions={"k": ...})

Patterns are spread over the operands, every dim becomes a list of factors, sizes are inferred to a fixed point, then
names that cannot be split (size 0 or 1) vanish and every name gets what its split leaves per output.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.errors import ConfigurationError
from autopar.ops.attention_blocks import Band
from autopar.rules.call import Call, TensorSpec
from autopar.rules.language import ELLIPSIS_NAME, Effect, Ellipsis, Factor, Pattern, TensorPattern, parse_pattern
from autopar.rules.rule import PAIR, Dim, RingTraffic, Rule, Tensor

_Factors = tuple[Factor, ...]
_WHOLE = (Factor(None, True),)


def bind_rule(text: str, call: Call) -> Rule:
    """The rule that `text` means for `call`. Raises ConfigurationError repeating the text and the shapes."""
    pattern = parse_pattern(text)
    operands = _spread(pattern.operands, len(call.operands), pattern, call)
    outputs = _spread(pattern.outputs, len(call.outputs), pattern, call)
    ellipsis = _Ellipsis(pattern, call, operands, outputs)
    inputs = [ellipsis.dims(p, s, False) for p, s in zip(operands, call.operands, strict=True)]
    results = [None if s is None else ellipsis.dims(p, s, True) for p, s in zip(outputs, call.outputs, strict=True)]
    tensors = [*zip(inputs, call.operands, strict=True)]
    tensors += [(dims, spec) for dims, spec in zip(results, call.outputs, strict=True) if dims and spec]
    sizes = _infer_sizes(tensors, pattern, call)
    rule_inputs = tuple(_tensor(dims, spec, sizes) for dims, spec in tensors[: len(inputs)])
    rule_outputs = tuple(
        None if spec is None else _tensor(dims or [], spec, sizes)
        for dims, spec in zip(results, call.outputs, strict=True)
    )
    names = _names((*rule_inputs, *(t for t in rule_outputs if t is not None)))
    effects = {
        **dict.fromkeys(ellipsis.reduced, pattern.reduce_effect),
        **(dict.fromkeys(ellipsis.names, pattern.effects["..."]) if "..." in pattern.effects else {}),
        **pattern.effects,
    }
    known = {"...": ellipsis.remaining, "output": _bytes(call.outputs[0]), **sizes}
    return Rule(
        inputs=rule_inputs,
        outputs=rule_outputs,
        sizes={name: sizes[name] for name in names},
        reductions=_reductions(names, effects, rule_outputs, pattern, call),
        linear=_linear(pattern, call),
        implementations={
            n: i for n in (*names, *_pairs(effects, names)) if n in effects and (i := effects[n].implementation)
        },
        synchronised_bytes={n: int(_evaluate(b, known)) for n in names if n in effects and (b := effects[n].bytes)},
        exchanged_bytes={n: int(_evaluate(e, known)) for n in names if n in effects and (e := effects[n].edges)},
        ring_traffic={n: _ring(n, effects[n], known) for n in names if n in effects and effects[n].ring},
        flops=_evaluate(pattern.flops, known) if pattern.flops else 0.0,
    )


def _fail(pattern: Pattern, call: Call, reason: str) -> ConfigurationError:
    shapes = [list(spec.shape) for spec in call.operands]
    results = [list(spec.shape) if spec else None for spec in call.outputs]
    return ConfigurationError(f"rule {pattern.text!r} of {call.target} on {shapes} -> {results}: {reason}")


def _spread(patterns: Sequence[TensorPattern], count: int, pattern: Pattern, call: Call) -> list[TensorPattern]:
    """One pattern per tensor: repeated patterns multiply, optional ones drop from the right."""
    spread = list(patterns)
    while len(spread) > count and any(p.optional or p.repeated for p in spread):
        spread.pop(max(at for at, p in enumerate(spread) if p.optional or p.repeated))
    while len(spread) < count and any(p.repeated for p in spread):
        at = max(at for at, p in enumerate(spread) if p.repeated)
        spread.insert(at, spread[at])
    if len(spread) != count:
        raise _fail(pattern, call, f"describes {len(patterns)} tensors, the call has {count}")
    return spread


class _Ellipsis:
    """What `...` stands for in this call: which of its dims are whole, missing from outputs, and reduced."""

    def __init__(
        self, pattern: Pattern, call: Call, operands: list[TensorPattern], outputs: list[TensorPattern]
    ) -> None:
        self._pattern, self._call = pattern, call
        pairs = [*zip(operands, call.operands, strict=True), *zip(outputs, call.outputs, strict=True)]
        remaining = [self._remaining(p, s) for p, s in pairs if s is not None and p.after is not None]
        self._rank = max(map(len, remaining), default=0)
        self._at = {dim for argument in pattern.at for dim in self._attribute(argument)}
        full = next((sizes for sizes in remaining if len(sizes) == self._rank), ())
        self.remaining = math.prod(size for dim, size in enumerate(full) if dim not in self._at)
        prefix = next((p.ellipsis.prefix for p, _ in pairs if p.after is not None), None)
        self.names = [f"{prefix}{dim}" for dim in range(self._rank)]
        named = {kind: self._attribute(argument) for kind, argument in pattern.attribute_dims.items()}
        self._whole = named.get("whole", set()) | named.get("drop", set())
        self._missing = named.get("drop", set()) | named.get("reduce", set())
        self.reduced = [f"d{dim}" for dim in sorted(named.get("reduce", set()))]

    def _remaining(self, pattern: TensorPattern, spec: TensorSpec) -> tuple[int, ...]:
        """Sizes of the remaining dims of a tensor; 1 for each that it lacks."""
        missing = len(self._pattern.at) if pattern.ellipsis.at == () else 0
        end = len(spec.shape) - len(pattern.after or ())
        return (*spec.shape[len(pattern.before) : end], *[1] * missing)

    def _attribute(self, argument: str) -> set[int]:
        """Dims of the ellipsis that the argument names."""
        every = set(range(self._rank))
        value = None if argument == "all" else self._call.argument(argument)
        if value is None or value == () or value == []:
            return every
        dims = (value,) if isinstance(value, int) else value
        return {dim % self._rank for dim in dims} if self._rank else set()

    def dims(self, pattern: TensorPattern, spec: TensorSpec, is_output: bool) -> list[_Factors]:
        """The factors of every dim of one tensor."""
        if pattern.after is None:
            dims = list(pattern.before)
        else:
            rank = len(spec.shape) - len(pattern.before) - len(pattern.after)
            dims = [*pattern.before, *self._expand(pattern.ellipsis, rank, is_output), *pattern.after]
        fits = len(dims) == len(spec.shape)
        if not fits or any(not dim and size != 1 for dim, size in zip(dims, spec.shape, strict=True)):
            raise _fail(self._pattern, self._call, f"{list(spec.shape)} has not the dims that are described")
        return dims

    def _expand(self, ellipsis: Ellipsis, rank: int, is_output: bool) -> list[_Factors]:
        if ellipsis.at is not None:
            each = [ellipsis.at if dim in self._at else (self._factor(dim, ellipsis),) for dim in range(self._rank)]
            return [dim for dims in each for dim in dims]
        if ellipsis.prefix is None:
            return [_WHOLE] * max(rank, 0)
        kept = list(range(self._rank))
        if is_output and self._missing and rank == self._rank - len(self._missing):
            kept = [dim for dim in kept if dim not in self._missing]
        elif is_output and self._missing:
            return [() if dim in self._missing else self._factor(dim, ellipsis) for dim in kept]
        return [self._factor(dim, ellipsis) for dim in kept[len(kept) - rank :]] if rank else []

    def _factor(self, dim: int, ellipsis: Ellipsis) -> _Factors:
        is_whole = dim in self._whole or ellipsis.prefix is None
        return _WHOLE if is_whole else (Factor(f"{ellipsis.prefix}{dim}", False),)


def _bytes(spec: TensorSpec | None) -> int:
    return 0 if spec is None else math.prod(spec.shape) * spec.dtype.itemsize


def _infer_sizes(tensors: Sequence[tuple[list[_Factors], TensorSpec]], pattern: Pattern, call: Call) -> dict[str, int]:
    """Size of every name; raises for contradictions and for sizes that nothing determines."""
    sizes = {**pattern.sizes, **{name: int(call.argument(given)) for name, given in pattern.size_arguments.items()}}
    dims = [(dim, size) for factors, spec in tensors for dim, size in zip(factors, spec.shape, strict=True)]
    broadcast = _broadcast_names(dims)
    progress = True
    while progress:
        progress = False
        for dim, size in dims:
            missing = [f.name for f in dim if f.name is not None and f.name not in sizes]
            if len(missing) != 1 or any(f.name is None for f in dim) or (missing[0] in broadcast and size == 1):
                continue
            known = math.prod(sizes[f.name] for f in dim if f.name in sizes)
            sizes[missing[0]] = (size - dim[0].more) // known if known else 0
            progress = True
    for dim, size in dims:
        _check_dim(dim, size, sizes, broadcast, pattern, call)
    return sizes


def _broadcast_names(dims: Sequence[tuple[_Factors, int]]) -> set[str]:
    """Names of the ellipsis that some tensor has with a size other than 1 (there, size 1 broadcasts)."""
    singles = [(dim[0].name, size) for dim, size in dims if len(dim) == 1]
    return {name for name, size in singles if size != 1 and name is not None and ELLIPSIS_NAME.match(name)}


def _check_dim(
    dim: _Factors, size: int, sizes: Mapping[str, int], broadcast: set[str], pattern: Pattern, call: Call
) -> None:
    names = [f.name for f in dim if f.name is not None]
    unknown = [name for name in names if name not in sizes]
    if unknown:
        raise _fail(pattern, call, f"nothing says how large {unknown[0]!r} is; add '; {unknown[0]} = size'")
    product = math.prod(sizes[name] for name in names) + sum(f.more for f in dim)
    if len(names) < len(dim):  # an anonymous whole factor takes the rest
        if len(dim) > 1 and (not product or size % product):
            raise _fail(pattern, call, f"a dim of size {size} has no factors {names} of {product}")
    elif product != size and not (size == 1 and names[0] in broadcast):
        raise _fail(pattern, call, f"{' '.join(names)!r} is {product} and {size}")


def _tensor(dims: list[_Factors], spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    return tuple(_dim(dim, size, sizes) for dim, size in zip(dims, spec.shape, strict=True))


def _dim(dim: _Factors, size: int, sizes: Mapping[str, int]) -> Dim:
    """Factors without those of size 1; whole ones as None."""
    if size == 1:
        return ()
    kept = [f for f in dim if f.name is None or sizes[f.name] != 1]
    return tuple(None if f.whole or size == 0 else f.name for f in kept)


def _names(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    found = {name: None for tensor in tensors for dim in tensor for name in dim if name is not None}
    return tuple(found)


def _pairs(effects: Mapping[str, Effect], names: Sequence[str]) -> list[str]:
    """The pairs of an annotation both of whose names may be split."""
    return [pair for pair in effects if PAIR in pair and set(pair.split(PAIR)) <= set(names)]


def _reductions(
    names: Sequence[str],
    effects: Mapping[str, Effect],
    outputs: Sequence[Tensor | None],
    pattern: Pattern,
    call: Call,
) -> dict[str, tuple[str | None, ...]]:
    """Per name that some output lacks: the reduction per output."""
    reductions = {}
    for name in names:
        lacking = [
            t is not None and spec is not None and math.prod(spec.shape) > 0 and all(name not in dim for dim in t)
            for t, spec in zip(outputs, call.outputs, strict=True)
        ]
        if not any(lacking):
            continue
        stated = effects.get(name, Effect()).reductions
        if len(stated) not in (0, 1, len(outputs)):
            raise _fail(pattern, call, f"{name!r} states {len(stated)} reductions for {len(outputs)} outputs")
        per_output = stated if len(stated) == len(outputs) else (stated[0] if stated else None,) * len(outputs)
        reductions[name] = tuple(op if lacks else None for op, lacks in zip(per_output, lacking, strict=True))
    return reductions


def _linear(pattern: Pattern, call: Call) -> tuple[tuple[bool, ...], ...]:
    """The patterns that fit the operands of this call."""
    if not call.operands or any(spec is None or _loses_sums(spec, call) for spec in call.outputs):
        return ()
    fitting = []
    for text in pattern.linear:
        marks = ["x"] * len(call.operands) if text == "all" else text.split()
        if len(marks) == len(call.operands) and all(
            not spec.shape for mark, spec in zip(marks, call.operands, strict=True) if mark == "s"
        ):
            fitting.append(tuple(mark == "x" for mark in marks))
    return tuple(dict.fromkeys(fitting))


def _loses_sums(output: TensorSpec, call: Call) -> bool:
    """Whether the dtype of an output breaks sums: bools, and integers rounded from floats."""
    if output.dtype == torch.bool:
        return True
    is_integer = not (output.dtype.is_floating_point or output.dtype.is_complex)
    return is_integer and any(spec.dtype.is_floating_point for spec in call.operands)


def _ring(name: str, effect: Effect, sizes: Mapping[str, Any]) -> RingTraffic:
    ring, home, joins = effect.ring or "0", effect.home or "0", effect.joins or "0"
    return RingTraffic(
        nbytes=int(_evaluate(ring, sizes)),
        home=int(_evaluate(home, sizes)),
        joined=int(_evaluate(joins, sizes)),
        names=frozenset(re.findall(r"[a-z]\w*", f"{ring}+{home}")),
        joined_names=frozenset(re.findall(r"[a-z]\w*", joins)),
        length=int(sizes[name]),
        band=Band(int(effect.before), int(effect.after)) if effect.before and effect.after else None,
    )


def _evaluate(expression: str, sizes: Mapping[str, Any]) -> float:
    """A sum of products of sizes and numbers."""
    products = [[part.strip() for part in term.split("*")] for term in expression.split("+")]
    return float(sum(math.prod(sizes[p] if p in sizes else float(p) for p in product) for product in products))
