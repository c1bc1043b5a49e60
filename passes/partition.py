"""Partition: one lowered graph -> a forward graph and a backward graph, split where the plan says.

    forward(inputs)           -> mutations, outputs, saved values
    backward(saved, tangents) -> gradients

The phase of every node is known, so there is nothing to decide but how backward gets a value of forward: inputs are
saved as themselves; views, factories and expansions are made again from what they look at; operators in `recompute`
are copied into backward, right in front of their first use there; everything else is saved, once. A copied
operator takes a gathered operand from backward's own gather if there is one, else gathers again: what grew is never
saved for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.cost_models.memory import LiveRange
from autopar.ops.blocks import keeps_order, padded, pieces_first, pieces_joined
from autopar.passes.emitter import Copy
from autopar.passes.local_values import is_getitem
from autopar.program import Program

aten = torch.ops.aten
_VIEWS = frozenset({aten.reshape.default, aten.permute.default, aten.expand.default})
_ALIASES = _VIEWS | {torch.ops._c10d_functional.wait_tensor.default, padded, aten.contiguous.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A value that forward hands to backward; inputs (parameters among them) cost no memory of their own."""

    name: str
    bytes: int
    is_input: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The two graphs of one rank; `backward` is None for a program without gradients. `parameters`: names of the
    forward placeholders that are parameters."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[SavedTensor, ...]
    parameters: frozenset[str]

    @property
    def saved_bytes(self) -> int:
        """Bytes of what is saved, without inputs."""
        return sum(value.bytes for value in self.saved if not value.is_input)


def split_forward_backward(program: Program, recompute: Collection[str] = ()) -> Partition:
    """Split a lowered program; `recompute`: names of the operators whose outputs backward computes again.

    backward takes the saved values in the order of `saved`, then the tangents in the order of the inputs.
    """
    returned = list(zip(program.returned, program.outputs, strict=True))
    outputs = [node for node, meaning in returned if meaning.role != "gradient"]
    gradients = [node for node, meaning in returned if meaning.role == "gradient"]
    pairs = list(zip(program.placeholders, program.inputs, strict=True))
    forward_inputs = [node for node, meaning in pairs if meaning.role != "tangent"]
    parameters = frozenset(node.name for node, meaning in pairs if meaning.role == "parameter")
    needs = _Needs(program.graph, gradients, frozenset(recompute)) if program.training else None
    saved = needs.saved if needs else []
    return Partition(
        forward=_forward_graph(program, forward_inputs, [*outputs, *saved]),
        backward=_backward_graph(program, needs, [n for n, m in pairs if m.role == "tangent"], gradients)
        if needs
        else None,
        saved=tuple(
            SavedTensor(name=node.name, bytes=node_bytes(node), is_input=node.op == "placeholder") for node in saved
        ),
        parameters=parameters,
    )


class _Needs:
    """What backward takes of forward: `saved` values, `copied` nodes, and copies that backward makes by itself."""

    def __init__(self, graph: fx.Graph, gradients: list[Any], recompute: frozenset[str]) -> None:
        self._recompute = recompute
        self._own_copies = {
            copy: node
            for node in graph.nodes
            if node.meta.get("phase") == "backward" and (copy := node.meta.get("redistributes")) is not None
        }
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.copied: set[fx.Node] = set()
        chosen = self._choose(list(_used_by_backward(graph, gradients)))
        self.saved = [node for node in graph.nodes if node in chosen]

    def _choose(self, wanted: list[fx.Node]) -> set[fx.Node]:
        """Values that backward itself wants come first: what they save, copied operators need not make again."""
        saved: set[fx.Node] = set()
        direct, indirect = wanted, list[fx.Node]()
        while direct or indirect:
            is_direct = bool(direct)
            node = direct.pop() if is_direct else indirect.pop()
            if node in saved or node in self.copied or node in self.replaced:
                continue
            own = None if is_direct else self._own_copy(node)
            if own is not None:
                self.replaced[node] = own
            elif self._is_made_again(node, is_direct):
                self.copied.add(node)
                recomputed = self._is_recomputed(node)
                (direct if is_direct and not recomputed else indirect).extend(node.all_input_nodes)
            else:
                saved.add(node)
        return saved

    def _own_copy(self, node: fx.Node) -> fx.Node | None:
        """The last node of backward's own copy, for the last node of the same copy in forward."""
        copy = node.meta.get("redistributes")
        is_last = copy is not None and all(user.meta.get("redistributes") != copy for user in node.users)
        return self._own_copies.get(copy) if is_last else None

    def _is_made_again(self, node: fx.Node, is_direct: bool) -> bool:
        if node.op == "placeholder":
            return False
        copy: Copy | None = node.meta.get("redistributes")
        if copy is not None:
            return (copy.grows and not is_direct) or self._is_recomputed(_source(node))
        if node.target in _VIEWS or not node.all_input_nodes:
            return True
        return self._is_recomputed(node)

    def _is_recomputed(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node.meta.get("operator") in self._recompute


def _source(node: fx.Node) -> fx.Node:
    """The node whose value a redistribution moves, seen through views."""
    while node.all_input_nodes and (node.meta.get("redistributes") is not None or node.target in _VIEWS):
        node = node.all_input_nodes[0]
    return node


def _used_by_backward(graph: fx.Graph, gradients: list[Any]) -> Iterator[fx.Node]:
    """Nodes of forward that nodes of backward, or the gradients themselves, read."""
    seen = set()
    readers = [node.all_input_nodes for node in graph.nodes if _is_backward(node) and node.op == "call_function"]
    for operands in (*readers, [node for node in gradients if isinstance(node, fx.Node)]):
        for node in operands:
            if not _is_backward(node) and node not in seen:
                seen.add(node)
                yield node


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("phase") == "backward"


def _forward_graph(program: Program, inputs: list[fx.Node], results: list[Any]) -> fx.GraphModule:
    graph = fx.Graph()
    made = {node: graph.node_copy(node) for node in inputs}
    needed = _reached_from(results)
    late = [node for node in needed if _is_backward(node)]
    assert not late, f"forward needs what backward computes: {late[:3]}"
    for node in program.graph.nodes:
        if node in needed and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] if isinstance(node, fx.Node) else node for node in results))
    return fx.GraphModule(program.graph_module, graph)


def _reached_from(results: list[Any]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    stack = [node for node in results if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def _backward_graph(program: Program, needs: _Needs, tangents: list[fx.Node], gradients: list[Any]) -> fx.GraphModule:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in needs.saved:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in tangents:
        made[node] = graph.node_copy(node)

    def made_operand(operand: fx.Node) -> fx.Node:
        return made[needs.replaced.get(operand, operand)]

    wanted = [node for node in program.graph.nodes if _is_backward(node) and node.op == "call_function"]
    for node in [*wanted, *(g for g in gradients if isinstance(g, fx.Node))]:
        for missing in _in_order(node, made, needs.replaced):
            made[missing] = graph.node_copy(missing, made_operand)
            made[missing].meta = {**missing.meta, "phase": "backward"}
    graph.output(tuple(made_operand(g) if isinstance(g, fx.Node) else g for g in gradients))
    return fx.GraphModule(program.graph_module, graph)


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


def node_bytes(node: fx.Node) -> int:
    """Bytes of the local value of a node; 0 for helpers without a stated shape."""
    shapes, dtypes = node.meta.get("local_shape"), node.meta.get("dtype")
    if shapes is None or dtypes is None:
        return 0
    if isinstance(dtypes, torch.dtype):
        return int(math.prod(shapes) * dtypes.itemsize)
    return sum(math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True) if s is not None)


def memory_events(partition: Partition) -> list[LiveRange]:
    """Live ranges over the nodes of forward, then backward: activations, saved values, gathered parameters, gradients
    and inputs; not the stored parameters. Indices count nodes; returned values live to the end."""
    timeline = _Timeline()
    forward = timeline.add(partition.forward.graph, {}, partition.parameters)
    if partition.backward is not None:
        returned = _returned(partition.forward.graph)[-len(partition.saved) :] if partition.saved else []
        placeholders = [node for node in partition.backward.graph.nodes if node.op == "placeholder"]
        saved = {p: forward[node] for p, node in zip(placeholders, returned, strict=False)}
        timeline.add(partition.backward.graph, saved, frozenset())
    return timeline.ranges(partition)


class _Timeline:
    """Buffers of several graphs that run one after the other; a node is read up to its last user."""

    def __init__(self) -> None:
        self._index = 0
        self._first: dict[fx.Node, int] = {}
        self._last: dict[fx.Node, int] = {}
        self._buffer: dict[fx.Node, fx.Node] = {}

    def add(self, graph: fx.Graph, known: dict[fx.Node, fx.Node], excluded: frozenset[str]) -> dict[fx.Node, fx.Node]:
        """Append a graph whose placeholders `known` live in earlier buffers; returns node -> its buffer."""
        buffers: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "output":
                break
            reads = [buffers[operand] for operand in node.all_input_nodes]
            begins = self._index
            if _is_one_of_several(node):  # lives by itself, and from where its operator ran
                begins, reads = self._first[reads[0]] + 1, []
            buffers[node] = known.get(node) or (reads[0] if reads and _is_alias(node) else node)
            if buffers[node] is node and not (node.op == "placeholder" and node.name in excluded):
                self._first[node] = begins
            for buffer in (*reads, buffers[node]):
                self._last[buffer] = self._index
            self._index += 1
        self._buffer.update(buffers)
        return buffers

    def ranges(self, partition: Partition) -> list[LiveRange]:
        count = len(partition.saved)
        outputs = _returned(partition.forward.graph)
        kept = outputs[: len(outputs) - count] + (_returned(partition.backward.graph) if partition.backward else [])
        for node in kept:
            if isinstance(node, fx.Node):
                self._last[self._buffer[node]] = self._index
        return [
            LiveRange(node.name, node_bytes(node), first, self._last[node])
            for node, first in self._first.items()
            if node_bytes(node)
        ]


def _is_alias(node: fx.Node) -> bool:
    if node.target is padded:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.meta.get("local_shape") == node.meta.get("local_shape")
    if node.target in (pieces_first, pieces_joined):
        return _moves_nothing(node)
    return bool(node.all_input_nodes) and (node.target in _ALIASES or is_getitem(node) or _is_view(node))


def _moves_nothing(node: fx.Node) -> bool:
    """Whether the pieces of a collective lie where they belong, without padding: its buffer is the value itself."""
    arguments: tuple[Any, ...] = node.args
    source, cuts, padded_shape = arguments[:3]
    shape = node.meta["local_shape"] if node.target is pieces_joined else source.meta.get("local_shape")
    return bool(shape == padded_shape and keeps_order(padded_shape, cuts))


def _is_view(node: fx.Node) -> bool:
    return bool(getattr(node.target, "is_view", False))


def _is_one_of_several(node: fx.Node) -> bool:
    """Whether a node takes an output with memory of its own from an operator with several."""
    return is_getitem(node) and not _is_view(node.all_input_nodes[0])


def _returned(graph: fx.Graph) -> list[Any]:
    result = graph.output_node().args[0]
    assert isinstance(result, tuple | list)
    return list(result)
