"""Exchanges: what travels when the rows of a layer of experts go to the ranks of their experts, per product.

    y = expert_linear(x, up, ids);  z = expert_linear(silu(y), down, ids);  sum(z * r)

    first product     the ids' counts, rows of x
    second product    r (or z back), rows of z back
    replicated        weights of replicated experts, with the first product that reads them, and their gradients

Where every rank sends as many rows to every expert (`ep="capacity"`), no counts do, and `zero_rows.py` says what joins.

Rows pass from product to product where they are (`passes/kernels/ordered_rows.py` says who else joins), so only what
enters and what leaves is priced, once. Products of one layer may choose differently; then more travels than is said
here, and the played step says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import fx

from autopar.graphs.expert_capacity import capacity_of
from autopar.graphs.expert_loads import expert_products, replicated_of
from autopar.graphs.operator_names import base_name
from autopar.passes.kernels.graph_patterns import shape_of
from autopar.passes.kernels.ordered_rows import OrderedRows, viewed
from autopar.passes.kernels.row_wise import RowWise
from autopar.passes.kernels.token_copies import copied_tokens, token_sums
from autopar.passes.kernels.travelling_rows import TravellingRows, rows_of_a_token
from autopar.passes.kernels.zero_rows import rows_with_zeros
from autopar.planner.problem.graph_operators import value_bytes
from autopar.program import Program
from autopar.rules.engine import tensor_operands

COUNT_BYTES, PLACE_BYTES = 8, 4
"""Of the number of rows that go to an expert, an int64, and of the place of a row's token, an int32."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a product exchanges. nbytes: of all rows together, or of the replicated experts; cut_by: the operand whose
    splits shorten it, or -1 for the result, or None where none does.

    each: rows of a token in the layer; once: the message is one of a layer whose tokens travel once to a rank, or
    (False) of one whose rows travel, or (None) of both; tokens: it is these; places: and numbers that say whose which
    are, of so many bytes."""

    nbytes: int
    cut_by: int | None
    collective: Literal["all_to_all", "all_reduce"] = "all_to_all"
    each: int = 1
    once: bool | None = None
    tokens: bool = False
    places: int = 0


def expert_exchanges(program: Program) -> dict[fx.Node, tuple[Message, ...]]:
    """Product of experts -> what it exchanges with the ranks over which rows and experts are split alike."""
    layers: dict[object, list[fx.Node]] = {}
    for node in expert_products(program.graph):
        layers.setdefault(viewed(tensor_operands(node)[-1]), []).append(node)
    every = [product for products in layers.values() for product in products]
    found: dict[fx.Node, tuple[Message, ...]] = {}
    for products in layers.values():
        found |= _of_layer(products, every)
    return found


def _of_layer(products: list[fx.Node], every: list[fx.Node]) -> Mapping[fx.Node, tuple[Message, ...]]:
    reads = {}
    for product in products:
        operands, linear = tensor_operands(product), base_name(product.target) == "expert_linear"
        reads[product] = RowWise(tuple(operands[:1] if linear else operands[:2]), linear)
    ids = tensor_operands(products[0])[-1]
    found: dict[fx.Node, list[Message]] = {product: [] for product in products}
    if capacity_of(products[0]) is not None:
        for product, message in _rows_of(products, rows_with_zeros(reads, ids, every), 1, once=False):
            found[product].append(message)
        return {product: tuple(messages) for product, messages in found.items()}
    experts = next(shape_of(tensor_operands(p)[1])[0] for p in products if base_name(p.target) == "expert_linear")
    each = rows_of_a_token(operand for how in reads.values() for operand in how.operands)
    for once in (False, True) if each > 1 else (False,):
        found[products[0]].append(Message(COUNT_BYTES * experts, None, each=each, once=once))
        rows = (OrderedRows if once else TravellingRows)(reads, ids, every)
        for product, message in _rows_of(products, rows, each, once):
            found[product].append(message)
    for product, message in _replicas(products):
        found[product].append(message)
    return {product: tuple(messages) for product, messages in found.items()}


def _rows_of(
    products: list[fx.Node], rows: OrderedRows, each: int, once: bool
) -> Iterator[tuple[fx.Node, Message]]:
    """What rows that enter and leave send, with the product that they are priced with. each: rows of a token; once:
    tokens travel instead where they can."""
    last, entered, placed = products[0], set(), False
    for node in sorted(rows.inside):
        last = node if node in products else last
        for operand in rows.operands(node):
            if rows.is_ordered(operand) or (viewed(operand), shape_of(operand)) in entered:
                continue
            entered.add((viewed(operand), shape_of(operand)))
            reader = tensor_operands(last).index(operand) if node is last else len(tensor_operands(last)) - 1
            tokens = once and copied_tokens(operand) is not None
            places = PLACE_BYTES * shape_of(operand)[0] * (tokens and not placed)
            placed = placed or tokens
            yield last, Message(value_bytes(operand), reader, each=each, once=once, tokens=tokens, places=places)
        if rows.is_ordered(node) and (others := [user for user in node.users if not rows.reads(user, node)]):
            sums = once and all(token_sums(other, node, each) is not None for other in others)
            side = -1 if base_name(last.target) == "expert_linear" else 0
            yield last, Message(value_bytes(node), side, each=each, once=once, tokens=sums)


def _replicas(products: list[fx.Node]) -> Iterator[tuple[fx.Node, Message]]:
    """What is added up of replicated experts: a weight once, where it is read first, and every gradient."""
    added = set()
    for product in products:
        linear, weight = base_name(product.target) == "expert_linear", viewed(tensor_operands(product)[1])
        value, replicated = tensor_operands(product)[1] if linear else product, replicated_of(product)
        if replicated and not (linear and weight in added):
            nbytes = value_bytes(value) * len(replicated) // shape_of(value)[0]
            yield product, Message(nbytes, 1 if linear else -1, "all_reduce")
        added.add(weight)
