"""Cut the program of one micro-batch into one program per stage, with named values between them.

    h = f(x, w)                      stage 0:  h = f(x, w); return h                     given dh:  return dw
    loss = g(h, v)            -->    stage 1:  loss = g(h, v); return loss               return dh, dv
    dh, dv = ...; dw = ...

Each is a `Program` of global shapes with forward and backward in one graph, so that the lowering takes it as any other.
A value from another stage is an input, its gradient a tangent; what goes elsewhere is an output or a gradient. All have
the name of the operator that makes them. A value goes straight to each stage that reads it. Statistics of the batch
depend on data alone: they are a program of their own, which every rank runs for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from autopar._compat import Graph, LazyGraphModule
from autopar.errors import PlanMismatchError
from autopar.graphs.node_values import is_backward
from autopar.passes.stages.place_stages import PlacedProgram, base_of, place_stages
from autopar.program import Input, Output, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that one stage makes and another reads, in forward or in backward. name: the operator that makes it;
    readers: the operators of the other stage that read it."""

    name: str
    source: int
    target: int
    is_backward: bool
    node: fx.Node
    readers: tuple[fx.Node, ...]


@dataclass(frozen=True, kw_only=True)
class StagePrograms:
    """programs: one per stage. statistics: the program that returns them, None where there are none. owners: loss or
    output -> the stage that makes it. holders: parameter -> the stages that read it."""

    programs: tuple[Program, ...]
    statistics: Program | None
    crossings: tuple[Crossing, ...]
    owners: dict[str, int]
    holders: dict[str, frozenset[int]]

    def crossings_into(self, stage: int, backward: bool) -> list[Crossing]:
        """What a pass of a stage receives, in the order of its inputs."""
        return [c for c in self.crossings if c.target == stage and c.is_backward == backward]

    def crossings_from(self, stage: int, backward: bool) -> list[Crossing]:
        """What a pass of a stage sends, in the order of its outputs; one value may go to several stages."""
        return [c for c in self.crossings if c.source == stage and c.is_backward == backward]


def cut_stages(program: Program, cuts: Sequence[str]) -> StagePrograms:
    """The programs of the stages that end at the operators `cuts`, and of the last one.

    program: of one micro-batch. Raises PlanMismatchError for cuts that are not in it, and for what stages cannot do.
    """
    return _Cutting(program, place_stages(program, cuts)).run()


def uncut(program: Program) -> StagePrograms:
    """The whole program as its only stage. Its statistics stay in it."""
    return StagePrograms(
        programs=(program,),
        statistics=None,
        crossings=(),
        owners={output.name: 0 for output in program.outputs if output.role in ("loss", "output")},
        holders={value.name: frozenset({0}) for value in program.inputs if value.role == "parameter"},
    )


class _Cutting:
    def __init__(self, program: Program, placed: PlacedProgram) -> None:
        self.program = program
        self.placed = placed
        self.meanings = dict(zip(program.placeholders, program.inputs, strict=True))
        self.last = placed.num_stages - 1

    def run(self) -> StagePrograms:
        results = [self._results(stage) for stage in range(self.last + 1)]
        parts = [self._part(stage, [node for node, _ in results[stage]]) for stage in range(self.last + 1)]
        crossings = tuple(
            Crossing(
                name=_name(node),
                source=self.placed.homes[node],
                target=stage,
                is_backward=is_backward(node),
                node=node,
                readers=tuple(call for call in part.calls if node in call.all_input_nodes),
            )
            for stage, part in enumerate(parts)
            for node in part.received
        )
        programs = tuple(self._program(stage, part, results[stage], crossings) for stage, part in enumerate(parts))
        return StagePrograms(
            programs=programs,
            statistics=self._statistics(),
            crossings=crossings,
            owners=self._owners,
            holders=dict(self.placed.holders),
        )

    # what a stage returns

    @cached_property
    def _owners(self) -> dict[str, int]:
        return {
            output.name: self.placed.homes.get(base_of(node), self.last)
            for node, output in self._returned
            if output.role in ("loss", "output") and isinstance(node, fx.Node)
        }

    @cached_property
    def _returned(self) -> list[tuple[Any, Output]]:
        pairs = list(zip(self.program.returned, self.program.outputs, strict=True))
        refused = [output for _, output in pairs if output.role in ("mutation", "guard")]
        refused += [o for _, o in pairs if o.role == "gradient" and o.name not in self.placed.holders]
        if refused:
            raise PlanMismatchError(
                f"stages cannot return the {refused[0].role} of {refused[0].name}: plan without a pipeline"
            )
        return pairs

    def _results(self, stage: int) -> list[tuple[tuple[fx.Node, ...], Output]]:
        """Loss, outputs and gradients of parameters that a stage returns: the terms of each, and what it is."""
        found: list[tuple[tuple[fx.Node, ...], Output]] = []
        for node, output in self._returned:
            if not isinstance(node, fx.Node) or output.role == "statistic":
                continue
            if output.role != "gradient":
                if self._owners[output.name] == stage:
                    found.append(((node,), output))
                continue
            terms = self.placed.terms.get(output.name, (node,))
            mine = tuple(term for term in terms if self._gradient_home(term, output.name) == stage)
            if mine:
                found.append((mine, output))
        return found

    def _gradient_home(self, term: fx.Node, parameter: str) -> int:
        """The stage that adds up a gradient: where it is made if that stage holds the parameter."""
        home = self.placed.homes.get(base_of(term), self.last)
        holders = self.placed.holders[parameter]
        if home in holders or not holders:
            return home
        return max((stage for stage in holders if stage < home), default=min(holders))

    # the graph of a stage

    def _part(self, stage: int, results: Sequence[tuple[fx.Node, ...]]) -> _Part:
        """What a stage computes, and what it takes from others."""
        mine = [node for node, home in self.placed.homes.items() if home == stage]
        stack = [*mine, *(term for terms in results for term in terms)]
        nodes: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node not in nodes:
                nodes.add(node)
                if node.op == "call_function" and self.placed.homes.get(node, stage) == stage:
                    stack.extend(node.all_input_nodes)
        ordered = [node for node in self.program.graph.nodes if node in nodes]
        calls = [node for node in ordered if node.op == "call_function"]
        return _Part(
            inputs=[node for node in ordered if node.op == "placeholder"],
            received=[node for node in calls if self.placed.homes.get(node, stage) != stage],
            calls=[
                node for node in ordered if node.op == "call_function" and self.placed.homes.get(node, stage) == stage
            ],
        )

    def _program(
        self, stage: int, part: _Part, results: list[tuple[tuple[fx.Node, ...], Output]], crossings: Sequence[Crossing]
    ) -> Program:
        graph = Graph()
        made: dict[fx.Node, fx.Node] = {}
        inputs: list[Input] = []
        plain = [node for node in part.inputs if self.meanings[node].role != "tangent"]
        tangents = [node for node in part.inputs if self.meanings[node].role == "tangent"]
        arrived = {backward: [n for n in part.received if is_backward(n) == backward] for backward in (False, True)}
        for node in (*plain, *arrived[False], *tangents, *arrived[True]):
            made[node], meaning = self._placeholder(graph, node)
            inputs.append(meaning)
        for node in part.calls:
            made[node] = graph.node_copy(node, made.__getitem__)
        sent = {
            b: _unique([c.node for c in crossings if c.source == stage and c.is_backward == b]) for b in (False, True)
        }
        gradients = [(self._sum(graph, made, terms, o), o) for terms, o in results if o.role == "gradient"]
        outputs = [
            *((made[terms[0]], output) for terms, output in results if output.role != "gradient"),
            *((made[node], Output(role="output", name=_name(node))) for node in sent[False]),
            *((made[node], Output(role="gradient", name=_name(node))) for node in sent[True]),
            *gradients,
        ]
        graph.output(tuple(node for node, _ in outputs))
        return replace(
            self.program,
            graph_module=LazyGraphModule(self.program.graph_module, graph),
            inputs=tuple(inputs),
            outputs=tuple(output for _, output in outputs),
            tensor_leaves=(),
            output_leaves=(),
        )

    def _placeholder(self, graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, Input]:
        copy = graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        if node.op == "placeholder":
            return copy, self.meanings[node]
        value = node.meta["val"]
        role = "tangent" if is_backward(node) else "input"
        return copy, Input(role=role, name=_name(node), shape=tuple(value.shape), dtype=value.dtype)  # type: ignore[arg-type]

    def _sum(
        self, graph: fx.Graph, made: dict[fx.Node, fx.Node], terms: tuple[fx.Node, ...], output: Output
    ) -> fx.Node:
        """The sum of some terms of a gradient, by the operator that adds them up in the program."""
        total = made[terms[0]]
        if len(terms) == 1:
            return total
        whole = next(node for node, other in self._returned if other is output)
        for term in terms[1:]:
            total = graph.call_function(whole.target, (total, made[term]))
            total.meta = dict(whole.meta)
        return total

    def _statistics(self) -> Program | None:
        pairs = [(node, output) for node, output in self._returned if output.role == "statistic"]
        if not pairs:
            return None
        part = self._part(self.last, [(node,) for node, _ in pairs])
        graph = Graph()
        made: dict[fx.Node, fx.Node] = {}
        needed = _reached([node for node, _ in pairs])
        inputs = [node for node in part.inputs if node in needed]
        for node in inputs:
            made[node], _ = self._placeholder(graph, node)
        for node in part.calls:
            if node in needed:
                made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(made[node] for node, _ in pairs))
        return replace(
            self.program,
            graph_module=LazyGraphModule(self.program.graph_module, graph),
            inputs=tuple(self.meanings[node] for node in inputs),
            outputs=tuple(output for _, output in pairs),
            tensor_leaves=(),
            output_leaves=(),
            training=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Nodes of one stage: placeholders of the program, values of other stages, and calls; in graph order."""

    inputs: list[fx.Node]
    received: list[fx.Node]
    calls: list[fx.Node]


def _name(node: fx.Node) -> str:
    return str(node.meta["operator"])


def _unique(nodes: list[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(nodes))


def _reached(results: Sequence[fx.Node]) -> set[fx.Node]:
    """What the results are made of."""
    found: set[fx.Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
