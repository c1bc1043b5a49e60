"""Finds the groups of `kernel_patterns` in a graph, forward and backward together.

    out = mul(cast(mul(wide, rstd)), weight)      a forward group, found by its last operator
    grad_x = add(mul(inner, rstd), ...)           its backward group, found behind what it reads of forward

A group counts only if nobody else reads what is inside: then all of it goes, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.passes.kernels.graph_patterns import VIEWS, Match, name_of, unviewed
from autopar.passes.kernels.kernel_patterns import PATTERNS, KernelPattern

REACH = 8
"""Operators between a value of forward and the last operator of the backward group that reads it."""
COLLECTIVES = ("all_reduce", "wait_tensor")


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """values: of both groups; `has_backward`: false where nothing is differentiated."""

    pattern: KernelPattern
    match: Match
    has_backward: bool


def found_groups(graph: fx.Graph, kind: str) -> list[FoundGroup]:
    """Every group of the patterns of a kind, in the order of the patterns; no node is in two of them."""
    found: list[FoundGroup] = []
    taken: set[fx.Node] = set()
    for pattern in (one for one in PATTERNS if one.kind == kind):
        for node in graph.nodes:
            if node in taken or _is_backward(node) != pattern.of_backward:
                continue
            forward = pattern.forward.find(pattern.root, node)
            if forward is None:
                continue
            group = _with_backward(pattern, forward)
            inside = _inside(group)
            if _is_closed(inside, group) and taken.isdisjoint(inside):
                found.append(group)
                taken |= inside
    return found


def _with_backward(pattern: KernelPattern, forward: Match) -> FoundGroup:
    match, complete = forward, True
    for line, anchor in pattern.anchors.items():
        if anchor not in match.values:
            continue
        candidates = (node for node in _behind(unviewed(match[anchor])) if _is_backward(node))
        tried = (pattern.backward.find(line, node, match) for node in candidates)
        behind = next((one for one in tried if one is not None), None)
        if behind is None:
            complete = complete and line in pattern.optional
        else:
            match = behind
    return FoundGroup(pattern, match if complete else forward, complete)


def _behind(node: fx.Node) -> Iterator[fx.Node]:
    """Readers of a value, and their readers, the nearest first."""
    seen, border = {node}, [node]
    for _ in range(REACH):
        border = [user for one in border for user in one.users if user not in seen]
        border = list(dict.fromkeys(border))
        seen.update(border)
        yield from border


def _inside(group: FoundGroup) -> set[fx.Node]:
    """Nodes that go with the group: neither views nor collectives."""
    return {node for node in group.match.nodes if name_of(node) not in (*VIEWS, *COLLECTIVES)}


def _is_closed(inside: set[fx.Node], group: FoundGroup) -> bool:
    kept = {group.match[name] for name in group.pattern.kept if name in group.match.values}
    return all(set(node.users) <= group.match.nodes for node in inside - kept)


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("phase") == "backward"
