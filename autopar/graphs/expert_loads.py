"""Loads: how many rows go to each expert, as a part of all, written into programs (`rows_per_rank.py` says what that
makes of the busiest rank).

    with_expert_load(program, {"layers.0.experts": (0.7, 0.1, 0.1, 0.1)})     the program whose products say so

What is said here changes prices, never values: graphs of a rank hold as many rows as the busiest rank expects, and a
run computes with those that come. Where a plan places experts, products count them as they lie: what is said of expert
`order[i]` stands at i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import fx

from autopar._compat import LazyGraphModule
from autopar.graphs.graph_copies import copied
from autopar.graphs.operator_names import base_name
from autopar.program import MicroProgram, Program

AnyProgram = TypeVar("AnyProgram", Program, MicroProgram)

LOAD = "expert_load"
"""Key in the meta of a product of experts: the part of the rows that goes to each."""
REPLICATED = "replicated_experts"
"""Key in the meta of a product of experts: those of which every rank has a copy where rows travel."""
ORDER = "expert_order"
"""Key in the meta of a product of experts: the expert at every position, where a plan places them."""
EXCHANGED = "exchanged_rows"
"""Key in the meta of an exchange of rows: its `ExchangedRows`."""
OWN_ROWS = "own_rows"
"""Key in the meta of a product with a block of the experts: what part of its rows has one of these."""
PRODUCTS = ("expert_linear", "expert_outer")
NONE: Mapping[str, Sequence[int]] = {}


def with_expert_load(
    program: AnyProgram,
    load: Mapping[str, Sequence[float]],
    replicated: Mapping[str, Sequence[int]] = NONE,
    order: Mapping[str, Sequence[int]] = NONE,
) -> AnyProgram:
    """The program whose products of experts carry the load of their module, and the experts of it that are replicated,
    as they lie; the program itself where they carry them already. order: of modules whose experts are placed."""

    def said(node: fx.Node) -> Mapping[str, object]:
        module, found = module_of(node), dict[str, object]()
        placed = tuple(order.get(module, ()))
        if placed:
            found[ORDER] = placed
        if module in load:
            found[LOAD] = tuple(load[module][one] for one in placed) or tuple(load[module])
        if module in replicated:
            copies = replicated[module]
            found[REPLICATED] = tuple(sorted(map(placed.index, copies))) if placed else tuple(copies)
        return {**dict.fromkeys({ORDER, REPLICATED} & node.meta.keys(), ()), **found}

    return with_said_of_experts(program, said)


def with_said_of_experts(program: AnyProgram, said: Callable[[fx.Node], Mapping[str, object]]) -> AnyProgram:
    """The program whose products of experts have in their meta what is said of them; the program itself where they have
    it already."""
    if isinstance(program, MicroProgram):
        return replace(program, program=with_said_of_experts(program.program, said),
                       whole=with_said_of_experts(program.whole, said))  # fmt: skip
    if all(said(node).items() <= node.meta.items() for node in expert_products(program.graph)):
        return program
    module = LazyGraphModule(program.graph_module, copied(program.graph))
    for node in expert_products(module.graph):
        node.meta |= said(node)
    return replace(program, graph_module=module)


def expert_products(graph: fx.Graph) -> list[fx.Node]:
    """The products of experts of a captured graph."""
    return [n for n in graph.nodes if n.op == "call_function" and base_name(n.target) in PRODUCTS]


def expert_counts(graph: fx.Graph) -> dict[str, int]:
    """Module -> how many experts its products have."""
    return {
        module_of(node): int(node.all_input_nodes[1].meta["val"].shape[0])
        for node in expert_products(graph)
        if base_name(node.target) == "expert_linear"
    }


def module_of(node: fx.Node) -> str:
    """The module whose call a node is part of."""
    return str(node.meta.get("operator", "")).partition("/")[0]


def load_of(node: fx.Node, experts: int) -> tuple[float, ...]:
    """The load that a product carries; even where it carries none."""
    found: tuple[float, ...] = node.meta.get(LOAD, (1.0 / experts,) * experts)
    return found


def order_of_experts(node: fx.Node) -> tuple[int, ...]:
    """The expert at every position, of a product whose experts are placed; empty where they lie as they are."""
    found: tuple[int, ...] = node.meta.get(ORDER, ())
    return found


def said_of(node: fx.Node) -> tuple[object, object]:
    """What a product carries of loads and copies."""
    return node.meta.get(LOAD), node.meta.get(REPLICATED)


def replicated_of(node: fx.Node) -> tuple[int, ...]:
    """The experts of a product that are replicated where its rows travel."""
    found: tuple[int, ...] = node.meta.get(REPLICATED, ())
    return found
