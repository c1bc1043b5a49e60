"""Discovery: propose a rule for an operator that nobody described, by trying how it may be split.

    discover("mylib::scaled_mm", (torch.randn(6, 12), torch.randn(12, 18)))   ->   "a b, b c -> a c ; linear: x - | - x"

A trial cuts one dim each of some operands in 2 and 3 parts, runs the operator on the parts and looks how the results
go together: concatenated along a dim, added, or reduced. Trials that hold for two draws of the values become the names
of a rule, which then passes the same proof as a rule that a user writes.

What this cannot find: splits that need other arguments on a block (sizes, start positions), masks, halos, fused dims.
It is only as good as the example: constant or one-sided values make wrong splits look right, so such examples are
refused. Operators that draw random numbers, change their operands or give data-dependent shapes are refused too.
Kernels may crash on blocks that do not belong together, so trials run in a forked child process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import ConfigurationError
from autopar.files import as_record, cache_directory, file_content, write_atomically
from autopar.rules.binding import bind_rule
from autopar.rules.child_process import run_in_child
from autopar.rules.language import parse_pattern
from autopar.rules.made_up import made_up_example
from autopar.rules.proof import (
    BLOCK_ERRORS,
    NUM_PARTS,
    block_of,
    call_for,
    equal_values,
    is_linear,
    prove_rule,
    run_operator,
)
from autopar.rules.registration import find_operator

log = logging.getLogger(__name__)

MAX_TRIALS = 4096
LEAST_FINITE = 4
"""One of so many values of a result must be finite: NaN equals NaN, however the operands were cut."""
MOST_PATTERNS = 6
"""Of more float operands than this, linear in which together is tried for each alone and for all."""
_VERSION = 2  # of the search: part of the cache key
_REDUCTIONS = ("sum", "max", "min")
Cut = tuple[int | None, ...]  # per tensor operand: the dim that is cut
Outcome = tuple[int | str, ...]  # per tensor result: the dim along which parts concatenate, a reduction, or "-": equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What was found. rule: None if no split holds; trials, crashes: how many were run and killed their process."""

    operator: str
    rule: str | None
    trials: int
    crashes: int


def discover(name: str, example: Sequence[Any] | None = None, *, use_cache: bool = True) -> Discovery:
    """Propose a rule for the operator `name` ("lib::op[.overload]") from positional example arguments.

    example: float tensors with distinct values of both signs; dims whose sizes 2 or 3 divide are tried (6 and 12 are
    good sizes). Without it, small shapes are tried until the operator runs. The result is cached by operator, versions
    of torch and of the operator's package, and example shapes, and is not registered: pass it to `register_rule`.
    Raises ConfigurationError for operators and examples that are refused (see the module), and where no example can be
    made up.
    """
    target = find_operator(name)
    return search_rule(target, made_up_example(target) if example is None else tuple(example), use_cache=use_cache)


def search_rule(target: Any, arguments: tuple[Any, ...], *, use_cache: bool = True) -> Discovery:
    """`discover` for an operator in hand."""
    _check_tags(target)
    _check_example(target, arguments)
    path = _cache_path(target, arguments)
    if use_cache and path.exists():
        log.info("rule of %s: taken from %s", target, path)
        return read_discovery(path, str(target))
    cuts = list(_cuts(arguments))
    log.info("rule of %s: %d ways to cut its operands are tried in a child process", target, len(cuts))
    outcomes, crashes = run_in_child(lambda index: _trial(target, arguments, cuts[index]), len(cuts))
    found = [(cut, outcome) for cut, outcome in zip(cuts, outcomes, strict=True) if outcome is not None]
    rule = _composed(target, arguments, found) if found else None
    discovery = Discovery(operator=str(target), rule=rule, trials=len(cuts), crashes=crashes)
    try:
        write_atomically(path, json.dumps(asdict(discovery)).encode())
    except ConfigurationError as error:
        log.warning("the rule of %s is not kept for the next time: %s", target, error)
    return discovery


def _composed(target: Any, arguments: tuple[Any, ...], found: Sequence[tuple[Cut, Outcome]]) -> str | None:
    (rule,), crashes = run_in_child(lambda _: _compose(target, arguments, found), 1)
    if crashes:
        raise ConfigurationError(f"{target} crashes, or hangs, while the splits that hold are put together")
    assert rule is None or isinstance(rule, str)
    return rule


def read_discovery(path: Path, operator: str) -> Discovery:
    """What `discover` left of an operator. Raises ConfigurationError where the file says something else."""
    try:
        found = as_record(file_content(path, "the file"), Discovery, "the file")
        if found.operator != operator:
            raise ConfigurationError(f"operator is {found.operator!r}, not {operator!r}")
        if found.rule is not None:
            parse_pattern(found.rule)
        return found
    except ConfigurationError as error:
        raise ConfigurationError(f"{path} is no discovered rule ({error}): delete it and ask again") from error


def _check_tags(target: Any) -> None:
    tags = set(getattr(target, "tags", ()))
    for tag, reason in (
        (torch.Tag.nondeterministic_seeded, "draws random numbers"),
        (torch.Tag.data_dependent_output, "gives results that depend on data"),
        (torch.Tag.dynamic_output_shape, "gives shapes that depend on data"),
    ):
        if tag in tags:
            raise ConfigurationError(f"{target} {reason}: no rule can be discovered by trying")
    if target._schema.is_mutable:
        raise ConfigurationError(f"{target} changes its operands: write a functional operator and a rule for it")


def _check_example(target: Any, arguments: tuple[Any, ...]) -> None:
    for position, leaf in enumerate(_tensors(arguments)):
        if leaf.is_floating_point() and leaf.numel() > 1:
            distinct = torch.unique(leaf).numel()
            if distinct < leaf.numel() or bool((leaf > 0).all()) or bool((leaf < 0).all()):
                raise ConfigurationError(
                    f"operand {position} of the example has {distinct} distinct values among {leaf.numel()}, or one "
                    "sign only: wrong splits would look right; use torch.randn"
                )
    outcome, crashes = run_in_child(lambda _: _misbehaviour(target, arguments), 1)
    if crashes or outcome[0]:
        raise ConfigurationError(
            f"{target} {outcome[0] or 'crashes, or hangs, on the example'}: no rule can be discovered by trying"
        )


def _misbehaviour(target: Any, arguments: tuple[Any, ...]) -> str:
    """What two runs on the example show: failure, hidden randomness, hidden mutation; empty if nothing."""
    before = [x.clone() for x in _tensors(arguments)]
    try:
        first = run_operator(target, arguments)
        first = tuple(x.clone() if isinstance(x, Tensor) else x for x in first)
        second = run_operator(target, arguments)
    except BLOCK_ERRORS as error:
        return f"does not run on the example ({error})"
    if not all(torch.equal(a, b) for a, b in zip(before, _tensors(arguments), strict=True)):
        return "changes its operands"
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, Tensor)]
    if not all(equal_values(a, b) for a, b in pairs):
        return "gives another result each time"
    return next(filter(None, map(_says_nothing, first)), "")


def _says_nothing(result: Any) -> str:
    """Why every split would look right by this result; empty if it would not."""
    if not isinstance(result, Tensor) or result.numel() < 2:
        return ""
    if bool((result == result.flatten()[0]).all()):
        return "gives one value everywhere"
    finite = int(torch.isfinite(result).sum())
    return "" if finite * LEAST_FINITE >= result.numel() else f"gives only {finite} finite of {result.numel()} values"


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _cuts(arguments: tuple[Any, ...]) -> Iterator[Cut]:
    """Every choice of one dim, or none, per tensor operand; the chosen ones have one size that 2 or 3 divides."""
    shapes = [tuple(x.shape) for x in _tensors(arguments)]
    sizes = sorted({size for shape in shapes for size in shape if size and any(size % p == 0 for p in NUM_PARTS)})
    choices = {n: [(None, *(dim for dim, size in enumerate(shape) if size == n)) for shape in shapes] for n in sizes}
    ways = sum(math.prod(map(len, dims)) - 1 for dims in choices.values())
    if ways > MAX_TRIALS:
        raise ConfigurationError(
            f"{len(shapes)} operands can be cut in {ways} ways, {MAX_TRIALS} are tried at most; write the rule by hand"
        )
    for dims in choices.values():
        yield from (cut for cut in itertools.product(*dims) if any(dim is not None for dim in cut))


def _trial(target: Any, arguments: tuple[Any, ...], cut: Cut) -> Outcome | None:
    """How the results of the parts go together, for all draws and numbers of parts; None if they do not."""
    possible: list[set[int | str]] | None = None
    for draw in range(2):
        drawn = _drawn(arguments, draw)
        results = run_operator(target, drawn)
        for num_parts in NUM_PARTS:
            parts = _run_parts(target, drawn, cut, num_parts)
            if parts is None:
                continue
            if not parts:
                return None
            fits = [_fits(expected, [part[i] for part in parts]) for i, expected in enumerate(results)]
            possible = fits if possible is None else [a & b for a, b in zip(possible, fits, strict=True)]
    if possible is None or any(not fits for fits in possible):
        return None
    outcome = tuple(_best(fits) for fits in possible)
    return None if all(kind == "-" for kind in outcome) else outcome


def _drawn(arguments: tuple[Any, ...], draw: int) -> tuple[Any, ...]:
    """The example, or the same values in another order."""
    if draw == 0:
        return arguments
    generator = torch.Generator().manual_seed(draw)

    def shuffled(x: Tensor) -> Tensor:
        return x.flatten()[torch.randperm(x.numel(), generator=generator)].reshape(x.shape)

    drawn: tuple[Any, ...] = pytree.tree_map_only(Tensor, shuffled, arguments)
    return drawn


def _run_parts(target: Any, arguments: tuple[Any, ...], cut: Cut, num_parts: int) -> list[tuple[Any, ...]] | None:
    """Results per part; empty if the operator refuses a part, None if the cut dims do not divide."""
    leaves, spec = pytree.tree_flatten(arguments)
    if any(x.shape[dim] % num_parts for x, dim in zip(_tensors(arguments), cut, strict=True) if dim is not None):
        return None
    results = []
    for part in range(num_parts):
        dims = iter(cut)
        local = []
        for leaf in leaves:
            dim = next(dims) if isinstance(leaf, Tensor) else None
            local.append(leaf if dim is None else block_of(leaf, dim, 1, num_parts, part))
        try:
            results.append(run_operator(target, pytree.tree_unflatten(local, spec)))
        except BLOCK_ERRORS:
            return []
    return results


def _fits(expected: Any, parts: Sequence[Any]) -> set[int | str]:
    """All ways in which the parts give the expected result."""
    if not isinstance(expected, Tensor):
        return {"-"} if all(part == expected for part in parts) else set()
    found: set[int | str] = {
        dim
        for dim in range(expected.dim())
        if sum(part.shape[dim] for part in parts if part.dim() == expected.dim()) == expected.shape[dim]
        and len({_without(part.shape, dim) for part in parts}) == 1
        and equal_values(torch.cat(list(parts), dim), expected)
    }
    if all(part.shape == expected.shape for part in parts):
        if all(equal_values(part, expected) for part in parts):
            found.add("-")
        stacked = torch.stack(list(parts))
        if expected.dtype != torch.bool and equal_values(stacked.sum(0).to(expected.dtype), expected):
            found.add("sum")
        if not expected.is_complex():
            found |= {op for op in ("max", "min") if equal_values(getattr(stacked, f"a{op}")(0), expected)}
    return found


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _best(fits: set[int | str]) -> int | str:
    """Equal parts carry no information, so a result that is equal everywhere is that and nothing else."""
    if "-" in fits:
        return "-"
    dims = sorted(fit for fit in fits if isinstance(fit, int))
    return dims[0] if dims else next(op for op in _REDUCTIONS if op in fits)


def _compose(target: Any, arguments: tuple[Any, ...], found: Sequence[tuple[Cut, Outcome]]) -> str | None:
    """The string that says all cuts that go together; a cut that the proof refuses is left out."""
    results = run_operator(target, arguments)
    chosen: list[tuple[Cut, Outcome]] = []
    for cut, outcome in sorted(found, key=_preference):
        if not any(_overlap(cut, outcome, other) for other in chosen):
            text = _text(arguments, results, [*chosen, (cut, outcome)], ())
            if _holds(target, arguments, results, text):
                chosen.append((cut, outcome))
    if not chosen:
        return None
    floats = [x.is_floating_point() or x.is_complex() for x in _tensors(arguments)]
    fitting = [m for m in _patterns(len(floats)) if all(f or not x for f, x in zip(floats, m, strict=True))]
    linear = [marks for marks in fitting if is_linear(target, arguments, results, marks)]
    text = _text(arguments, results, chosen, linear)
    return text if _holds(target, arguments, results, text) else _text(arguments, results, chosen, ())


def _patterns(count: int) -> list[tuple[bool, ...]]:
    """Which operands an operator may be linear in together."""
    if count > MOST_PATTERNS:
        return [(True,) * count, *(tuple(i == alone for i in range(count)) for alone in range(count))]
    return [marks for marks in itertools.product((True, False), repeat=count) if any(marks)]


def _preference(candidate: tuple[Cut, Outcome]) -> tuple[int, int, tuple[int, ...]]:
    """Splits that keep every result split come first, then those of more operands."""
    cut, outcome = candidate
    order = tuple(-1 if dim is None else dim for dim in cut)
    return sum(not isinstance(kind, int) for kind in outcome), -sum(dim is not None for dim in cut), order


def _overlap(cut: Cut, outcome: Outcome, other: tuple[Cut, Outcome]) -> bool:
    """Whether two candidates claim one dim of an operand or of a result."""
    pairs = [*zip(cut, other[0], strict=True), *zip(outcome, other[1], strict=True)]
    return any(isinstance(a, int) and a == b for a, b in pairs)


def _holds(target: Any, arguments: tuple[Any, ...], results: tuple[Any, ...], text: str) -> bool:
    try:
        prove_rule(target, arguments, results, bind_rule(text, call_for(target, arguments, results)), text)
    except ConfigurationError:
        return False
    return True


def _text(
    arguments: tuple[Any, ...],
    results: tuple[Any, ...],
    chosen: Sequence[tuple[Cut, Outcome]],
    linear: Sequence[tuple[bool, ...]],
) -> str:
    """The rule string of these candidates."""
    operands = [["_"] * x.dim() for x in _tensors(arguments)]
    outputs = [["_"] * x.dim() if isinstance(x, Tensor) else [] for x in results]
    effects = []
    names = [
        f"{letter}{number}" for number in ("", *range(1, 9)) for letter in string.ascii_lowercase if letter not in "dx"
    ]
    for (cut, outcome), name in zip(sorted(chosen, key=_first_place), names, strict=False):
        for dims, dim in zip(operands, cut, strict=True):
            if dim is not None:
                dims[dim] = name
        for dims, kind in zip(outputs, outcome, strict=True):
            if isinstance(kind, int):
                dims[kind] = name
        left = [str(kind) for kind in outcome if not isinstance(kind, int)]
        if left and left != ["sum"] * len(left):
            kinds = ["-" if isinstance(kind, int) else kind for kind in outcome]
            effects.append(f"{name}: {' '.join(kinds)}")
    marks = " | ".join(" ".join("x" if mark else "-" for mark in pattern) for pattern in linear)
    signature = f"{_tensors_text(operands)} -> {_tensors_text(outputs)}"
    return " ; ".join([signature, *effects, *([f"linear: {marks}"] if marks else [])])


def _first_place(candidate: tuple[Cut, Outcome]) -> tuple[int, int]:
    """(operand, dim) where a candidate appears first: names are given in reading order."""
    return next((operand, dim) for operand, dim in enumerate(candidate[0]) if dim is not None)


def _tensors_text(tensors: Sequence[Sequence[str]]) -> str:
    return ", ".join(" ".join(dims) if dims else "[...]" for dims in tensors)


def _cache_path(target: Any, arguments: tuple[Any, ...]) -> Path:
    described = [
        f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in pytree.tree_leaves(arguments)
    ]
    versions = [_VERSION, torch.__version__, _package_version(target)]
    question = [*versions, str(target._schema), described, *getattr(target, "names", ())]
    digest = hashlib.sha256(json.dumps(question).encode()).hexdigest()[:24]
    return cache_directory() / "rules" / f"{target!s}-{digest}.json"


def _package_version(target: Any) -> str:
    """Version of the package that is called as the operator's library is; empty where there is none."""
    try:
        return version(str(target).partition(".")[0])
    except PackageNotFoundError:
        return ""
