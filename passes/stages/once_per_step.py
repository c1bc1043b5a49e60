"""What a stage makes once per step and not once per micro-batch: what follows from parameters alone.

    forward(w, x):                                             prepare(w): return all_gather(w)
        g = all_gather(w); return x g, x
    backward(w, x, dy):                        -->             forward(w, x, g): return x g, x
        g = all_gather(w); return dy g', x' dy                 backward(w, x, dy, g): return dy g', x' dy

Gathered parameters and their casts then stay for the whole step, one copy for forward and backward. Where a rank runs
all micro-batches one after the other, the first forward makes what is prepared between its own operators, so that a
gather runs beside what does not need it:

    first(w, x): g = all_gather(w); return x g, x, g
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from torch import fx

from autopar._compat import Graph, LazyGraphModule
from autopar.graphs.forward_backward import Partition
from autopar.passes.random_operators import is_random
from autopar.program import returned_values

PREPARED = "prepared_"
"""How the names of placeholders for what is made once begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """`prepare` takes the placeholders `parameters` of forward. `forward` and `backward` take some of the values that
    it returns, those at `of_forward` and `of_backward`, behind their other inputs."""

    prepare: fx.GraphModule
    parameters: tuple[str, ...]
    forward: fx.GraphModule
    of_forward: tuple[int, ...]
    backward: fx.GraphModule | None
    of_backward: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many values `prepare` returns."""
        return len(returned_values(self.prepare.graph))


def prepare_parameters(partition: Partition, but: Collection[str] = ()) -> Prepared:
    """Take what follows from parameters alone out of both graphs. but: names of those that count as anything else."""
    keys = _Keys(partition, partition.parameters.difference(but))
    forward = _taken_out(partition.forward, keys)
    backward = [] if partition.backward is None else _taken_out(partition.backward, keys)
    found = list(dict.fromkeys(keys.of(node) for node in (*forward, *backward)))
    order = {key: index for index, key in enumerate(found)}
    prepare, parameters = _preparing(found, keys, partition)
    return Prepared(
        prepare=prepare,
        parameters=parameters,
        forward=_without(partition.forward, forward, keys),
        of_forward=tuple(order[keys.of(node)] for node in forward),
        backward=None if partition.backward is None else _without(partition.backward, backward, keys),
        of_backward=tuple(order[keys.of(node)] for node in backward),
    )


def first_forward(forward: fx.GraphModule, prepared: Prepared) -> fx.GraphModule:
    """`forward`, which takes what is prepared, with `prepare` in it: it makes each value where it first reads it, those
    that only backward reads at the end, and returns them all behind its own results."""
    graph = Graph()
    made: dict[fx.Node, fx.Node] = {}
    taken = forward.graph.find_nodes(op="placeholder")
    own = len(taken) - len(prepared.of_forward)
    for node in taken[:own]:
        made[node] = graph.node_copy(node)
    by_name = {node.name: made[node] for node in taken[:own]}
    values = returned_values(prepared.prepare.graph)
    source = {node: values[index] for node, index in zip(taken[own:], prepared.of_forward, strict=True)}

    def value(node: fx.Node) -> fx.Node:
        found = source.get(node, node)
        for missing in _operands_first(found, made):
            made[missing] = by_name[missing.name] if missing.op == "placeholder" else graph.node_copy(missing, value)
        return made[found]

    for node in forward.graph.nodes:
        if node.op == "call_function":
            made[node] = graph.node_copy(node, value)
    results = [value(node) if isinstance(node, fx.Node) else node for node in returned_values(forward.graph)]
    graph.output((*results, *(value(node) for node in values)))
    return LazyGraphModule(forward, graph)


def _operands_first(node: fx.Node, made: Collection[fx.Node]) -> list[fx.Node]:
    """What has to be made for a node of `prepare`, in an order in which it can be."""
    found: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        missing = [operand for operand in stack[-1].all_input_nodes if operand not in made and operand not in found]
        if missing and stack[-1] not in made:
            stack += missing
        elif (current := stack.pop()) not in made:
            found[current] = None
    return list(found)


class _Keys:
    """Equal keys for calls of forward and of backward that make the same of the same parameters."""

    def __init__(self, partition: Partition, parameters: Collection[str]) -> None:
        self._of: dict[fx.Node, Hashable] = {}
        self._by_name: dict[str, Hashable] = {name: name for name in parameters}
        self.source: dict[Hashable, fx.Node] = {}
        for node in partition.forward.graph.nodes:
            if self.of(node) is not None:
                self._by_name[node.name] = self.of(node)  # as backward knows it, where forward saves it

    def of(self, node: fx.Node) -> Hashable:
        """None: the node does not follow from parameters alone."""
        if node not in self._of:
            self._of[node] = key = self._made(node)
            if node.op == "call_function" and key is not None:
                self.source.setdefault(key, node)
        return self._of[node]

    def _made(self, node: fx.Node) -> Hashable:
        if node.op == "placeholder":
            return self._by_name.get(node.name)
        operands = [self.of(operand) for operand in node.all_input_nodes]
        if node.op != "call_function" or is_random(node) or not operands or None in operands:
            return None
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda operand: None)
        return str(node.target), repr(arguments), tuple(operands)


def _taken_out(graph_module: fx.GraphModule, keys: _Keys) -> list[fx.Node]:
    """The calls that follow from parameters alone and are read by others."""
    return [
        node
        for node in graph_module.graph.nodes
        if node.op == "call_function" and keys.of(node) is not None and any(keys.of(u) is None for u in node.users)
    ]


def _without(graph_module: fx.GraphModule, taken_out: list[fx.Node], keys: _Keys) -> fx.GraphModule:
    """The graph with placeholders for what is taken out, behind the others."""
    graph = Graph()
    made = {node: graph.node_copy(node) for node in graph_module.graph.find_nodes(op="placeholder")}
    for node in taken_out:
        made[node] = graph.placeholder(f"{PREPARED}{node.name}")
        made[node].meta = dict(node.meta)
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and keys.of(node) is None:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(fx.node.map_arg(graph_module.graph.output_node().args[0], made.__getitem__))
    return LazyGraphModule(graph_module, graph)


def _preparing(wanted: list[Hashable], keys: _Keys, partition: Partition) -> tuple[fx.GraphModule, tuple[str, ...]]:
    graph = Graph()
    placeholders = {
        node.name: graph.node_copy(node)
        for node in partition.forward.graph.find_nodes(op="placeholder")
        if node.name in partition.parameters
    }
    made: dict[Hashable, fx.Node] = dict(placeholders)

    def value(key: Hashable) -> fx.Node:
        if key not in made:
            node = keys.source[key]
            operands = {operand: value(keys.of(operand)) for operand in node.all_input_nodes}
            made[key] = graph.node_copy(node, operands.__getitem__)
        return made[key]

    graph.output(tuple(value(key) for key in wanted))
    return LazyGraphModule(partition.forward, graph), tuple(placeholders)
