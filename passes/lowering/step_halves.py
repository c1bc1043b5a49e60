"""Partition: one lowered graph -> a forward graph and a backward graph, split where the plan says.

    forward(inputs)           -> mutations, outputs, saved values
    backward(saved, tangents) -> gradients

The phase of every node is known, so there is nothing to decide but how backward gets a value of forward
(`saved_values`). What is made again is copied in front of its first use in backward; where the plan says that it is
computed once more, the copy, with all that looks at it or moves it, is given up, and the next use makes another:

    y = f(x)                          a = g(y)  b = h(y)     backward, y given up before b
    y = f(x); a = g(y); y_1 = f(x); b = h(y_1)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from autopar._compat import Graph, LazyGraphModule
from autopar.graphs.forward_backward import Partition, SavedTensor
from autopar.graphs.node_values import VIEWS, is_backward, is_getitem, node_bytes
from autopar.passes.lowering.saved_values import SavedValues
from autopar.program import Program

NOTHING: Mapping[str, Collection[str]] = MappingProxyType({})


def split_forward_backward(
    program: Program, recompute: Collection[str] = (), recompute_at: Mapping[str, Collection[str]] = NOTHING
) -> Partition:
    """Split a lowered program; `recompute`: names of the operators whose outputs backward computes again;
    `recompute_at`: of those that it computes several times -> operators of backward before which it does so once more.

    backward takes the saved values in the order of `saved`, then the tangents in the order of the inputs.
    """
    returned = list(zip(program.returned, program.outputs, strict=True))
    outputs = [node for node, meaning in returned if meaning.role != "gradient"]
    gradients = [node for node, meaning in returned if meaning.role == "gradient"]
    pairs = list(zip(program.placeholders, program.inputs, strict=True))
    forward_inputs = [node for node, meaning in pairs if meaning.role != "tangent"]
    parameters = frozenset(node.name for node, meaning in pairs if meaning.role == "parameter")
    values = SavedValues(program.graph, gradients, frozenset(recompute)) if program.training else None
    saved = values.saved if values else []
    return Partition(
        forward=_forward_graph(program, forward_inputs, [*outputs, *saved]),
        backward=_backward_graph(program, values, [n for n, m in pairs if m.role == "tangent"], gradients, recompute_at)
        if values
        else None,
        saved=tuple(
            SavedTensor(name=node.name, bytes=node_bytes(node), is_input=node.op == "placeholder") for node in saved
        ),
        parameters=parameters,
    )


def _forward_graph(program: Program, inputs: list[fx.Node], results: list[Any]) -> fx.GraphModule:
    graph = Graph()
    made = {node: graph.node_copy(node) for node in inputs}
    needed = _reached_from(results)
    late = [node for node in needed if is_backward(node)]
    assert not late, f"forward needs what backward computes: {late[:3]}"
    for node in program.graph.nodes:
        if node in needed and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] if isinstance(node, fx.Node) else node for node in results))
    return LazyGraphModule(program.graph_module, graph)


def _reached_from(results: list[Any]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    stack = [node for node in results if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def _backward_graph(
    program: Program,
    values: SavedValues,
    tangents: list[fx.Node],
    gradients: list[Any],
    recompute_at: Mapping[str, Collection[str]],
) -> fx.GraphModule:
    graph = Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in values.saved:
        made[node] = graph.placeholder(node.name)
        made[node].meta.update(node.meta)
    for node in tangents:
        made[node] = graph.node_copy(node)

    def made_operand(operand: fx.Node) -> fx.Node:
        return made[values.replaced.get(operand, operand)]

    wanted = [node for node in program.graph.nodes if is_backward(node) and node.op == "call_function"]
    given_up = _given_up(program.graph, values, recompute_at)
    for node in [*wanted, *(g for g in gradients if isinstance(g, fx.Node))]:
        for late in given_up.pop(str(node.meta.get("operator")), ()):
            made.pop(late, None)
        for missing in _in_order(node, made, values.replaced):
            made[missing] = graph.node_copy(missing, made_operand)
            made[missing].meta["phase"] = "backward"
    graph.output(tuple(made_operand(g) if isinstance(g, fx.Node) else g for g in gradients))
    return LazyGraphModule(program.graph_module, graph)


def _given_up(
    graph: fx.Graph, values: SavedValues, recompute_at: Mapping[str, Collection[str]]
) -> dict[str, list[fx.Node]]:
    """Operator of backward -> the copied nodes that are given up before it."""
    moments: dict[fx.Node, frozenset[str]] = {}
    found: dict[str, list[fx.Node]] = {}
    for node in graph.nodes if recompute_at else ():
        if node not in values.copied:
            continue
        own = frozenset(recompute_at.get(str(node.meta.get("operator")), ()))
        if is_getitem(node) or node.target in VIEWS or node.meta.get("redistributes") is not None:
            own = own.union(*(moments.get(operand, ()) for operand in node.all_input_nodes))
        moments[node] = own
        for moment in own:
            found.setdefault(moment, []).append(node)
    return found


def _in_order(node: fx.Node, made: dict[fx.Node, fx.Node], replaced: dict[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    """What has to be made for `node`, operands first; depth first without recursion."""
    stack = [(replaced.get(node, node), False)]
    while stack:
        current, operands_are_made = stack.pop()
        if current in made:
            continue
        if operands_are_made:
            yield current
            continue
        stack.append((current, True))
        for operand in reversed(current.all_input_nodes):
            stack.append((replaced.get(operand, operand), False))
