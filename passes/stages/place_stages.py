"""Which stage of a pipeline runs each operator of a program that holds forward and backward.

    h = f(x, w); y = g(h, v); loss = sum(y)      cut behind f:      stage 0: f          stage 1: g, sum
    dy, dv, dh = ...; dw = ...                                      stage 0: dw         stage 1: dy, dv, dh

A forward operator belongs to the run between two cuts in which it stands. A backward operator runs on the latest stage
that has what it reads of forward, behind the stages of the gradients that it reads: so an activation is never sent for
backward alone, and a gradient crosses where its activation did. A sum of gradients from several stages runs where it
is used, so that the gradient of a skip goes straight back, and so does what is made of nothing but a gradient that
crosses for others. What follows from data alone (masks, positions), views, and
casts of parameters have no stage: they are made again wherever they are read.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import fx

from autopar.errors import PlanMismatchError
from autopar.graphs.node_values import is_backward
from autopar.passes.random_operators import is_random
from autopar.passes.view_layouts import viewed
from autopar.program import Program
from autopar.rules.engine import is_view

_aten = torch.ops.aten
_LINEAR = frozenset({_aten._to_copy.default})
Stages = frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedProgram:
    """homes: node -> its stage; nodes without one are made again where they are read. holders: parameter -> stages of
    forward that read it. terms: the gradient of a parameter of several stages -> what its sum adds up; the sum itself
    has no home."""

    homes: Mapping[fx.Node, int]
    holders: Mapping[str, Stages]
    terms: Mapping[str, tuple[fx.Node, ...]]
    num_stages: int


def place_stages(program: Program, cuts: Sequence[str]) -> PlacedProgram:
    """Place every operator; `cuts`: the forward operators that end the stages but the last, in program order.

    Raises PlanMismatchError for cuts that the program does not have or that stand in another order, and for an operator
    that no stage can run.
    """
    return _Placement(program, cuts).run()


def made_everywhere(program: Program) -> set[fx.Node]:
    """What no stage sends to another: views, what follows from data alone, and casts of parameters."""
    return _Placement(program, ()).without_home()


def base_of(node: fx.Node) -> fx.Node:
    """The node behind a chain of views."""
    while node.op == "call_function" and is_view(node):
        node = viewed(node)
    return node


class _Placement:
    def __init__(self, program: Program, cuts: Sequence[str]) -> None:
        self.program = program
        self.last = len(cuts)
        self.meanings = dict(zip(program.placeholders, program.inputs, strict=True))
        self.order = {node: index for index, node in enumerate(program.graph.nodes)}
        self.ends = _positions(program, cuts, self.order)
        self.homes: dict[fx.Node, int] = {}
        self.everywhere: set[fx.Node] = set()
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = {}

    def run(self) -> PlacedProgram:
        calls = [node for node in self.program.graph.nodes if node.op == "call_function"]
        self._find_everywhere(calls)
        for node in calls:
            if not is_backward(node) and self._is_placed(node):
                self.homes[node] = bisect_left(self.ends, self.order[_source(node)])
        self.available = self._available(calls)
        holders = {
            meaning.name: self.available.get(node, frozenset())
            for node, meaning in self.meanings.items()
            if meaning.role == "parameter"
        }
        terms, dissolved = self._terms(holders)
        backward = [n for n in calls if is_backward(n) and self._is_placed(n) and n not in dissolved]
        allowed, wanted = self._allowed_and_wanted(backward, holders, terms)
        for node in backward:
            self.homes[node] = self._backward_home(node, allowed, wanted)
        return PlacedProgram(homes=self.homes, holders=holders, terms=terms, num_stages=self.last + 1)

    # what has no home

    def without_home(self) -> set[fx.Node]:
        self._find_everywhere([node for node in self.program.graph.nodes if node.op == "call_function"])
        return self.everywhere

    def _find_everywhere(self, calls: Iterable[fx.Node]) -> None:
        for node in calls:
            if is_view(node) or (
                not is_random(node) and all(self._is_data(operand) for operand in node.all_input_nodes)
            ):
                self.everywhere.add(node)
            if node.target in _LINEAR and self._is_parameter(base_of(node.all_input_nodes[0])):
                self.everywhere.add(node)

    def _is_data(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return self.meanings[node].role not in ("parameter", "tangent")
        base = base_of(node)
        return (
            self._is_data(base)
            if base.op == "placeholder"
            else base in self.everywhere and not self._of_parameter(base)
        )

    def _of_parameter(self, node: fx.Node) -> bool:
        return any(self._is_parameter(source) for source in self._read(node))

    def _is_parameter(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and self.meanings[node].role == "parameter"

    def _is_placed(self, node: fx.Node) -> bool:
        return node not in self.everywhere

    def _read(self, node: fx.Node) -> frozenset[fx.Node]:
        """The placed nodes, parameters and tangents that a node reads, through what is made again."""
        if node not in self.sources:
            found: set[fx.Node] = set()
            for operand in node.all_input_nodes:
                if operand.op == "placeholder":
                    found |= {operand} if self.meanings[operand].role in ("parameter", "tangent") else set()
                elif operand in self.everywhere:
                    found |= self._read(operand)
                else:
                    found.add(operand)
            self.sources[node] = frozenset(found)
        return self.sources[node]

    def _available(self, calls: Iterable[fx.Node]) -> dict[fx.Node, Stages]:
        """Forward value or parameter -> the stages that have it in forward."""
        found: dict[fx.Node, set[int]] = {node: {home} for node, home in self.homes.items()}
        for node in calls:
            if node in self.homes:
                for source in self._read(node):
                    found.setdefault(source, set()).add(self.homes[node])
        return {node: frozenset(stages) for node, stages in found.items()}

    # backward

    def _terms(self, holders: Mapping[str, Stages]) -> tuple[dict[str, tuple[fx.Node, ...]], set[fx.Node]]:
        """The terms of gradients of parameters that several stages read, and the sums that they come from."""
        terms: dict[str, tuple[fx.Node, ...]] = {}
        dissolved: set[fx.Node] = set()
        for node, output in zip(self.program.returned, self.program.outputs, strict=True):
            if output.role == "gradient" and isinstance(node, fx.Node) and len(holders.get(output.name, ())) > 1:
                terms[output.name] = tuple(_terms_of(node, dissolved))
        return terms, dissolved

    def _allowed_and_wanted(
        self, backward: Sequence[fx.Node], holders: Mapping[str, Stages], terms: Mapping[str, tuple[fx.Node, ...]]
    ) -> tuple[dict[fx.Node, Stages], dict[fx.Node, int]]:
        """(node that only turns a gradient into those of parameters -> their stages, node -> stage of its readers)."""
        targets: dict[fx.Node, list[Stages]] = {}
        for node, output in zip(self.program.returned, self.program.outputs, strict=True):
            if output.role == "gradient" and isinstance(node, fx.Node):
                for term in terms.get(output.name, (node,)):
                    targets.setdefault(base_of(term), []).append(holders.get(output.name, frozenset()))
        allowed: dict[fx.Node, Stages] = {}
        for node in backward:
            for source in self._read(node):
                self.readers.setdefault(source, []).append(node)
        wanted: dict[fx.Node, int] = {}
        for node in reversed(backward):
            kept = self._kept_sets(node)
            sets = [*targets.get(node, []), *(allowed.get(r, frozenset()) for r in self.readers.get(node, []))]
            stages = [*(max(s) for s in targets.get(node, []) if s), *(wanted[r] for r in self.readers.get(node, []))]
            wanted[node] = (
                max(reduce(operator.and_, kept), default=self.last) if kept else max(stages, default=self.last)
            )
            if not kept and sets and all(sets) and sum(map(is_backward, self._read(node))) == 1:
                allowed[node] = reduce(operator.or_, sets)
        return allowed, wanted

    def _kept_sets(self, node: fx.Node) -> list[Stages]:
        """Per forward value or parameter that backward reads, the stages that have it."""
        return [
            self.available[source]
            for source in self._read(node)
            if source in self.available and not is_backward(source)
        ]

    def _backward_home(self, node: fx.Node, allowed: Mapping[fx.Node, Stages], wanted: Mapping[fx.Node, int]) -> int:
        if node.target is operator.getitem:
            return self.homes[_source(node)]
        before = {self.homes.get(s, self.last) for s in self._read(node) if is_backward(s)}
        latest = min(before, default=self.last)
        kept = self._kept_sets(node)
        if kept:
            common = [stage for stage in reduce(operator.and_, kept) if stage <= latest]
            home = max(common) if common else max(min(stages) for stages in kept)
        elif node in allowed:
            home = max((stage for stage in allowed[node] if stage <= latest), default=latest)
        else:
            home = min(latest, wanted[node]) if len(before) > 1 or self._follows(node, wanted) else latest
        if home > latest:
            raise PlanMismatchError(
                f"{node.meta['operator']} needs a gradient of stage {latest} and a value of stage {home}, which comes "
                "later: cut the model elsewhere"
            )
        return home

    def _follows(self, node: fx.Node, wanted: Mapping[fx.Node, int]) -> bool:
        """Whether the one gradient that a node reads goes to where the node is wanted in any case, for another reader.

        clone(expand(g)), the gradient of a sum over a token's experts, is k times g, which the residual needs too.
        """
        read = self._read(node)
        others = [other for source in read for other in self.readers.get(source, ()) if other is not node]
        return len(read) == 1 and any(wanted[other] <= wanted[node] for other in others)


def _positions(program: Program, cuts: Sequence[str], order: Mapping[fx.Node, int]) -> list[int]:
    named = {
        node.meta["operator"]: order[node]
        for node in program.graph.nodes
        if node.op == "call_function" and not is_backward(node)
    }
    missing = [cut for cut in cuts if cut not in named]
    if missing:
        raise PlanMismatchError(f"stages end at {missing[0]}, which is no forward operator of this model: plan again")
    positions = [named[cut] for cut in cuts]
    if positions != sorted(set(positions)):
        raise PlanMismatchError(f"stages end at {list(cuts)}, which is not the order of the program")
    return positions


def _source(node: fx.Node) -> fx.Node:
    """The operator of which a node is one output, or the node itself."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _terms_of(gradient: fx.Node, dissolved: set[fx.Node]) -> list[fx.Node]:
    """What a sum of gradients adds up; the sums themselves go to `dissolved`.

    add(add(a, b), c)    -->    a, b, c
    """
    is_sum = gradient.target is _aten.add.Tensor and len(gradient.users) == 1 and not gradient.kwargs
    operands = list(gradient.args)
    if not is_sum or not all(isinstance(o, fx.Node) and _same_shape(o, gradient) for o in operands):
        return [gradient]
    dissolved.add(gradient)
    return [term for operand in operands if isinstance(operand, fx.Node) for term in _terms_of(operand, dissolved)]


def _same_shape(one: fx.Node, other: fx.Node) -> bool:
    return bool(one.meta["val"].shape == other.meta["val"].shape and one.meta["val"].dtype == other.meta["val"].dtype)
