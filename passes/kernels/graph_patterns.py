"""Patterns of operators as text, found in a graph by walking from a root back to its operands.

    wide = cast(x)
    rstd = rsqrt(add(mean(pow(wide, 2), [-1], True), eps))
    out = mul(cast(mul(wide, rstd)), weight)

A line names a value; a name without a line is free and takes what stands there, a node or a number. Where a name
occurs again it must be the same value, views apart. Operators are bare ATen names; `add` and `mul` match both orders.
Words that may match nothing at all, since a graph has them or not:

    cast(v)          a change of dtype                     wider(v)         views, and casts that lose nothing
    view(v)          views                                 reduced(v, "max")  an all_reduce over ranks, with its wait
    plus(v, other)   v, or v and something else: the addition of `other` (None: there is none)
    total(a, b, c)   their sum, whatever was added first
    lookup(v, i, s)  gather along dim 1, or masked_gather from a block that starts at s (0 for gather)
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

aten = torch.ops.aten
VIEWS = ("reshape", "view", "_unsafe_view", "expand", "contiguous")
COMMUTATIVE = ("add", "mul")


@dataclass(frozen=True, slots=True)
class Match:
    """values: what every name stands for; nodes: all nodes that were walked over, without those of free names."""

    values: Mapping[str, Any] = field(default_factory=dict)
    nodes: frozenset[fx.Node] = frozenset()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def with_value(self, name: str, value: Any) -> Match:
        """With one more name."""
        return Match({**self.values, name: value}, self.nodes)

    def with_node(self, node: fx.Node) -> Match:
        """With one more node walked over."""
        return Match(self.values, self.nodes | {node})


@dataclass(frozen=True, slots=True)
class GraphPattern:
    """Parsed lines by name, in order."""

    lines: Mapping[str, ast.expr]

    def find(self, name: str, node: fx.Node, known: Match | None = None) -> Match | None:
        """The first way in which `node` is the value of the line `name`, beside what is known already."""
        start = known or Match()
        found = next(_match(self.lines[name], node, start, self), None)
        return None if found is None else found.with_value(name, node)


def pattern(text: str) -> GraphPattern:
    """Parse a pattern, one `name = expression` per line."""
    lines: dict[str, ast.expr] = {}
    for statement in ast.parse("\n".join(line.strip() for line in text.strip().splitlines())).body:
        assert isinstance(statement, ast.Assign), f"a line of a pattern is name = expression: {ast.unparse(statement)}"
        (target,) = statement.targets
        assert isinstance(target, ast.Name), f"a line of a pattern names one value: {ast.unparse(statement)}"
        lines[target.id] = statement.value
    return GraphPattern(lines)


def name_of(node: object) -> str:
    """Bare operator name of a call, "" for everything else."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name.split("::")[-1])
    return str(getattr(node.target, "__name__", ""))


def unviewed(value: Any) -> Any:
    """What a chain of views looks at."""
    while name_of(value) in VIEWS:
        value = value.args[0]
    return value


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Who reads a value, behind views and transpositions."""
    found = []
    for user in node.users:
        is_view = name_of(user) in (*VIEWS, "permute")
        found += readers_of(user) if is_view else [user]
    return found


def _match(wanted: ast.expr, value: Any, match: Match, inside: GraphPattern) -> Iterator[Match]:
    if isinstance(wanted, ast.Name):
        yield from _named(wanted.id, value, match, inside)
    elif isinstance(wanted, ast.Call):
        assert isinstance(wanted.func, ast.Name)
        word = _WORDS.get(wanted.func.id)
        if word is not None:
            yield from word(wanted, value, match, inside)
        elif name_of(value) == wanted.func.id:
            yield from _call(wanted, value, match, inside)
    elif isinstance(wanted, ast.List) and any(isinstance(one, ast.Call) for one in wanted.elts):
        if isinstance(value, list | tuple) and len(value) == len(wanted.elts):
            yield from _operands(wanted.elts, list(value), match, inside)
    elif _plain(value) == ast.literal_eval(wanted):
        yield match


def _named(name: str, value: Any, match: Match, inside: GraphPattern) -> Iterator[Match]:
    if name in match.values:
        if _is_same(match[name], value):
            yield match if value is match[name] else _walked_views(value, match)
    elif name in inside.lines:
        for found in _match(inside.lines[name], value, match, inside):
            yield found.with_value(name, value)
    else:
        yield match.with_value(name, value)


def _is_same(first: Any, second: Any) -> bool:
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return bool(first == second)
    return unviewed(first) is unviewed(second) and "expand" not in (name_of(first), name_of(second))


def _walked_views(value: Any, match: Match) -> Match:
    while name_of(value) in VIEWS:
        match, value = match.with_node(value), value.args[0]
    return match


def _call(wanted: ast.Call, node: fx.Node, match: Match, inside: GraphPattern) -> Iterator[Match]:
    keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in wanted.keywords}
    if any(node.kwargs.get(str(key)) != value for key, value in keywords.items()):
        return
    if any(key not in keywords and key not in ("dtype", "device", "layout") for key in node.kwargs):
        return
    orders = [node.args, node.args[::-1]] if wanted.func.id in COMMUTATIVE else [node.args]  # type: ignore[attr-defined]  # a Name, as _match asserts
    for operands in orders:
        if len(operands) == len(wanted.args):
            yield from _operands(wanted.args, list(operands), match.with_node(node), inside)


def _operands(wanted: list[ast.expr], values: list[Any], match: Match, inside: GraphPattern) -> Iterator[Match]:
    if not wanted:
        yield match
        return
    for found in _match(wanted[0], values[0], match, inside):
        yield from _operands(wanted[1:], values[1:], found, inside)


def _through(passes: Callable[[fx.Node], bool], again: bool) -> _Word:
    """A word for nodes that may stand in front of its operand: the innermost value is tried first."""

    def word(wanted: ast.Call, value: Any, match: Match, inside: GraphPattern) -> Iterator[Match]:
        if name_of(value) and passes(value):
            inner = wanted if again else wanted.args[0]
            yield from _match(inner, value.args[0], match.with_node(value), inside)
        yield from _match(wanted.args[0], value, match, inside)

    return word


def _reduced(wanted: ast.Call, value: Any, match: Match, inside: GraphPattern) -> Iterator[Match]:
    inner, operation = wanted.args[0], ast.literal_eval(wanted.args[1])
    if name_of(value) == "wait_tensor":
        started = value.args[0]
        if name_of(started) == "all_reduce" and started.args[1] == operation:
            plain = started.args[0]
            seen = match.with_node(value).with_node(started)
            if name_of(plain) == "contiguous":
                seen, plain = seen.with_node(plain), plain.args[0]
            yield from _match(inner, plain, seen, inside)
        return
    yield from _match(inner, value, match, inside)


def _lookup(wanted: ast.Call, value: Any, match: Match, inside: GraphPattern) -> Iterator[Match]:
    name = name_of(value)
    if name == "gather" and value.args[1] in (1, -1):
        found = [value.args[0], value.args[2], 0]
    elif name == "masked_gather" and value.args[1] == 1:
        found = [value.args[0], value.args[2], value.args[3]]
    else:
        return
    yield from _operands(wanted.args, found, match.with_node(value), inside)


def _plus(wanted: ast.Call, value: Any, match: Match, inside: GraphPattern) -> Iterator[Match]:
    inner, other = wanted.args
    assert isinstance(other, ast.Name)
    if name_of(value) == "add" and len(value.args) == 2:
        for first, second in (value.args, value.args[::-1]):
            for found in _match(inner, first, match.with_node(value), inside):
                yield found.with_value(other.id, second)
    for found in _match(inner, value, match, inside):
        yield found.with_value(other.id, None)


def _total(wanted: ast.Call, value: Any, match: Match, inside: GraphPattern) -> Iterator[Match]:
    for terms, added in _terms(value, len(wanted.args)):
        seen = Match(match.values, match.nodes | added)
        for order in itertools.permutations(terms):
            yield from _operands(wanted.args, list(order), seen, inside)


def _terms(value: Any, count: int) -> Iterator[tuple[tuple[Any, ...], frozenset[fx.Node]]]:
    """(`count` summands of a tree of additions, the additions)."""
    if count == 1:
        yield (value,), frozenset()
    elif name_of(value) == "add" and len(value.args) == 2:
        for left in range(1, count):
            for first, above in _terms(value.args[0], left):
                for second, below in _terms(value.args[1], count - left):
                    yield (*first, *second), above | below | {value}


def _widens(node: fx.Node) -> bool:
    if name_of(node) in VIEWS:
        return name_of(node) != "expand"
    return name_of(node) == "_to_copy" and dtype_of(node).itemsize >= dtype_of(node.args[0]).itemsize


def _plain(value: Any) -> Any:
    """Lists as fx keeps them compare with lists."""
    return list(value) if isinstance(value, (list, tuple)) else value


def shape_of(node: Any) -> tuple[int, ...]:
    """Local shape of a node of a lowered graph, global shape of a captured one."""
    shape = node.meta.get("local_shape")
    return tuple(node.meta["val"].shape if shape is None else shape)


def dtype_of(node: Any) -> torch.dtype:
    """The dtype of a node of a lowered or captured graph."""
    dtype = node.meta.get("dtype")
    found: torch.dtype = node.meta["val"].dtype if dtype is None else dtype
    return found


_Word: TypeAlias = Callable[[ast.Call, Any, Match, GraphPattern], Iterator[Match]]
_WORDS: Mapping[str, _Word] = {
    "cast": _through(lambda node: name_of(node) == "_to_copy", again=False),
    "view": _through(lambda node: name_of(node) in VIEWS, again=True),
    "wider": _through(_widens, again=True),
    "reduced": _reduced,
    "plus": _plus,
    "total": _total,
    "lookup": _lookup,
}
