"""Repeated blocks and cuts of a model, found on its operator graph by networkx.

    transformer.h.0, transformer.h.1, ...    one kind of block, repeated: equal operators, shapes and wiring
    a cut                                    an operator of the forward pass through which every path from the batch
                                             to the loss leads: the natural stage boundaries

Blocks are grouped by what they compute (a Weisfeiler-Lehman hash of the labelled graph), never by their names.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass

import networkx as nx
from torch import fx

from autopar.passes.module_segments import block_path
from autopar.planner.problem.factorisation import Factorisation, shape_of, value_of
from autopar.planner.problem.graph_operators import base_of, operators
from autopar.program import Program
from autopar.rules.engine import tensor_operands

_SOURCE = "batch"


@dataclass(frozen=True, slots=True)
class Blocks:
    """kinds: for every kind of block the module paths that are of this kind, in program order. cuts: names of the
    operators that every path from the batch to the result passes, in program order."""

    kinds: tuple[tuple[str, ...], ...]
    cuts: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of all kinds together."""
        return sum(len(paths) for paths in self.kinds)


def blocks_of(program: Program, factorisation: Factorisation) -> Blocks:
    """`find_blocks`, worked out once and kept with the program's factorisation."""
    found = factorisation.derived.get("blocks")
    if not isinstance(found, Blocks):
        found = find_blocks(program)
        factorisation.derived["blocks"] = found
    return found


def find_blocks(program: Program) -> Blocks:
    """Blocks (modules whose path ends in a number) by kind, and the cuts of the forward pass."""
    graph = operator_graph(program)
    kinds: dict[str, list[str]] = {}
    for path, members in _members(graph).items():
        block = graph.subgraph(members)
        labelled = nx.DiGraph()
        labelled.add_nodes_from((node, {"label": repr(_label(node))}) for node in block)
        labelled.add_edges_from(block.edges)
        kinds.setdefault(_hash(labelled), []).append(path)
    return Blocks(tuple(tuple(paths) for paths in kinds.values()), _cuts(program, graph))


def _hash(labelled: nx.DiGraph) -> str:
    with warnings.catch_warnings():  # networkx tells that its hashes changed between versions; ours do not last
        warnings.simplefilter("ignore", UserWarning)
        return str(nx.weisfeiler_lehman_graph_hash(labelled, node_attr="label"))


def operator_graph(program: Program) -> nx.DiGraph:
    """Operators as nodes, an edge for every tensor that one reads of another (views folded away)."""
    graph = nx.DiGraph()
    for node in operators(program):
        graph.add_node(node)
        for operand in tensor_operands(node):
            producer = base_of(operand)[0][0]
            if producer.op == "call_function":
                graph.add_edge(producer, node)
    return graph


def _members(graph: nx.DiGraph) -> dict[str, list[fx.Node]]:
    found: dict[str, list[fx.Node]] = {}
    for node in graph:
        path = block_path(str(node.meta["operator"]))
        if path is not None:
            found.setdefault(path, []).append(node)
    return found


def _label(node: fx.Node) -> Hashable:
    operands = tuple(shape_of(*value_of(operand)) for operand in tensor_operands(node))
    return str(node.target), operands, str(node.meta["phase"])


def _cuts(program: Program, graph: nx.DiGraph) -> tuple[str, ...]:
    """The forward operators that dominate the first loss or output, seen from the input that is read first (labels
    enter late and would hide every cut)."""
    result = next(
        (
            base_of(node)[0][0]
            for node, o in zip(program.returned, program.outputs, strict=True)
            if o.role in ("loss", "output")
        ),
        None,
    )
    if result is None or result not in graph:
        return ()
    forward = nx.DiGraph(graph.subgraph([node for node in graph if node.meta["phase"] == "forward"]))
    for node in _first_readers(program, forward):
        forward.add_edge(_SOURCE, node)
    if _SOURCE not in forward or not nx.has_path(forward, _SOURCE, result):
        return ()
    dominators = nx.immediate_dominators(forward, _SOURCE)
    found: list[fx.Node] = [result]
    while dominators[found[-1]] != _SOURCE:
        found.append(dominators[found[-1]])
    return tuple(str(node.meta["operator"]) for node in reversed(found))


def _first_readers(program: Program, forward: nx.DiGraph) -> list[fx.Node]:
    """The operators that read the input which is read first."""
    inputs = {node for node, e in zip(program.placeholders, program.inputs, strict=True) if e.role == "input"}
    first: fx.Node | None = None
    readers = []
    for node in operators(program):
        for operand in tensor_operands(node):
            origin = base_of(operand)[0][0]
            if node in forward and origin in inputs and first in (None, origin):
                first = origin
                readers.append(node)
    return readers
