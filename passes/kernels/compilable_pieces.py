"""Cut a graph into pieces that a compiler may take whole, and what runs between them node by node.

    x = mm(a, w); r = all_reduce(x); y = wait(r); z = mul(y, y); out = sin(z)
        -->   [mm, all_reduce, wait]  as they are     [mul, sin]  compiled

A piece is a run of nodes in program order, so pieces run one behind the other and collectives start where they did. A
compiled piece holds operators on tensors of one block of the model (`segments.block_path`), at least two of them bound
by memory: what is left has nothing to fuse. Equal layers have equal pieces, and `Piece.text` says so: a compiler sees
each once. Views belong to whoever reads them, so nothing but whole tensors goes from piece to piece.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import fx

from autopar._compat import Graph, LazyGraphModule
from autopar.graphs.copy_nodes import HOST_COPIES
from autopar.graphs.kernel_groups import launches_kernel, passes_through
from autopar.graphs.node_values import VARYING
from autopar.graphs.operator_names import operator_kind
from autopar.ops.symmetric_products import SYMMETRIC
from autopar.passes.module_segments import block_path

_OPENED = "autopar.ops."
"""Python functions of this package are made of operators on tensors, and a compiler looks into them."""
_UNFIT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilablePiece:
    """A part of a graph as a graph of its own.

    inputs, outputs: names in the whole graph of what it takes and returns; the last piece returns what the whole graph
    does. ends: inputs that no later piece takes.
    """

    graph_module: fx.GraphModule
    compiled: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ends: frozenset[str]

    @property
    def text(self) -> str:
        """What the piece computes; the same for two pieces that differ in names only."""
        names = {node: f"%{index}" for index, node in enumerate(self.graph_module.graph.nodes)}
        return "\n".join(
            f"{_target_text(node)} {fx.node.map_arg((node.args, node.kwargs), names.__getitem__)}" for node in names
        )


def cut_into_pieces(graph_module: fx.GraphModule) -> list[CompilablePiece]:
    """The pieces of a graph in their order; the last one returns its outputs."""
    graph = graph_module.graph
    runs = [*_runs(graph), (False, [graph.output_node()])]
    piece_of = {node: index for index, (_, nodes) in enumerate(runs) for node in nodes}
    taken = [list(dict.fromkeys(base for node in nodes for base in _bases(node))) for _, nodes in runs]
    last = {base: index for index, bases in enumerate(taken) for base in bases}
    pieces = []
    for index, (compiled, nodes) in enumerate(runs):
        inputs = [base for base in taken[index] if piece_of.get(base) != index]
        outputs = [node for node in nodes if last.get(node, index) > index]
        pieces.append(
            CompilablePiece(
                graph_module=LazyGraphModule(graph_module, _graph_of(nodes, inputs, outputs)),
                compiled=compiled,
                inputs=tuple(base.name for base in inputs),
                outputs=tuple(node.name for node in outputs),
                ends=frozenset(base.name for base in inputs if last[base] == index),
            )
        )
    return pieces


def _runs(graph: fx.Graph) -> Iterator[tuple[bool, list[fx.Node]]]:
    """Nodes that compute, in program order, cut where what may be compiled or its block changes."""
    own = [node for node in graph.nodes if node.op not in ("placeholder", "output") and not _is_view(node)]
    items = {node: node.all_input_nodes[0] for node in own if node.target is operator.getitem}
    calls = [node for node in own if node not in items]
    cut = [(key, list(nodes)) for key, nodes in groupby(calls, _place)]
    decided = [(key is not None and _is_worth_it(nodes), nodes) for key, nodes in cut]
    items_of: dict[fx.Node, list[fx.Node]] = {}
    for item, source in items.items():
        items_of.setdefault(source, []).append(item)
    for compiled, together in _joined(decided):
        yield compiled, [node for call in together for node in (call, *items_of.get(call, ()))]


def _joined(runs: Iterable[tuple[bool, list[fx.Node]]]) -> Iterator[tuple[bool, list[fx.Node]]]:
    """Neighbours that run node by node are one piece; compiled ones stay apart."""
    plain: list[fx.Node] = []
    for compiled, nodes in runs:
        if not compiled:
            plain += nodes
            continue
        if plain:
            yield False, plain
            plain = []
        yield True, nodes
    if plain:
        yield False, plain


def _place(node: fx.Node) -> str | None:
    """The block of a node that may be compiled, "" outside of blocks; None for a node that may not."""
    return (block_path(str(node.meta.get("operator", ""))) or "") if _is_fit(node) else None


def _is_fit(node: fx.Node) -> bool:
    if node.op != "call_function" or VARYING in node.meta or node.target in HOST_COPIES:
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target.namespace.endswith("c10d_functional") and _UNFIT.isdisjoint(node.target.tags)
    return str(getattr(node.target, "__module__", "")).startswith(_OPENED) and node.target not in SYMMETRIC


def _is_worth_it(nodes: Sequence[fx.Node]) -> bool:
    return sum(launches_kernel(node) and operator_kind(node.target) == "memory" for node in nodes) > 1


def _is_view(node: fx.Node) -> bool:
    """Whether a node names bytes of its operand: a view, or an item of several views."""
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return is_operator and passes_through(node) and _is_fit(node) and bool(node.all_input_nodes)


def _bases(node: fx.Node) -> Iterator[fx.Node]:
    """What a node reads, through views."""
    for operand in node.all_input_nodes:
        if _is_view(operand):
            yield from _bases(operand)
        else:
            yield operand


def _graph_of(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.Graph:
    graph = Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            for operand in node.all_input_nodes:
                copied(operand)
            copies[node] = graph.node_copy(node, copies.__getitem__)
            _forget_idle_salt(copies[node])
        return copies[node]

    for node in nodes:
        if node.op == "output":
            for operand in node.all_input_nodes:
                copied(operand)
            graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
            return graph
        copied(node)
    graph.output(tuple(copies[node] for node in outputs))
    return graph


def _forget_idle_salt(node: fx.Node) -> None:
    """Attention that drops nothing draws nothing, so its call-site number shall not tell two layers apart."""
    if isinstance(node.target, torch._ops.OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]
        if "dropout_p" in names and node.args[names.index("dropout_p")] == 0.0:
            node.update_arg(names.index("salt"), 0)


def _target_text(node: fx.Node) -> str:
    if node.op == "placeholder" or isinstance(node.target, str):
        return node.op
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return f"{node.target.__module__}.{node.target.__qualname__}"
