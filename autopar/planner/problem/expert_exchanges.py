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
from autopar.passes.kernels.zero_rows import rows_with_zeros
from autopar.planner.problem.graph_operators import value_bytes
from autopar.program import Program
from autopar.rules.engine import tensor_operands

COUNT_BYTES, PLACE_BYTES = 8, 4
"""Of the number of rows that go to an expert, an int64, and of the place of a row's token, an int32."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a product exchanges. nbytes: of all rows together, or of the replicated experts; cut_by: the operand whose
    splits shorten it, or -1 for the result, or None where none does; each: the rows are of tokens, so many of each, and
    these may travel instead; places: of the numbers that say who gets which."""

    nbytes: int
    cut_by: int | None
    collective: Literal["all_to_all", "all_reduce"] = "all_to_all"
    each: int = 1
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
    is_capped = capacity_of(products[0]) is not None
    rows = (rows_with_zeros if is_capped else OrderedRows)(reads, ids, every)
    found: dict[fx.Node, list[Message]] = {product: [] for product in products}
    experts = next(shape_of(tensor_operands(p)[1])[0] for p in products if base_name(p.target) == "expert_linear")
    if not is_capped:
        found[products[0]].append(Message(COUNT_BYTES * experts, None))
    each = 1 if is_capped else _rows_of_a_token(rows)
    last, entered, tokens_enter = products[0], set(), False
    for node in sorted(rows.inside):
        last = node if node in found else last
        for operand in rows.operands(node):
            if rows.is_ordered(operand):
                continue
            key = viewed(operand), shape_of(operand)
            if key not in entered:
                entered.add(key)
                reader = tensor_operands(last).index(operand) if node is last else len(tensor_operands(last)) - 1
                copies = each if copied_tokens(operand) is not None else 1
                places = PLACE_BYTES * shape_of(operand)[0] * (copies > 1 and not tokens_enter)
                tokens_enter = tokens_enter or copies > 1
                found[last].append(Message(value_bytes(operand), reader, each=copies, places=places))
        if rows.is_ordered(node) and (others := [user for user in node.users if not rows.reads(user, node)]):
            are_sums = all(token_sums(other, node, each) is not None for other in others)
            side = -1 if base_name(last.target) == "expert_linear" else 0
            found[last].append(Message(value_bytes(node), side, each=each if are_sums else 1))
    for product, message in _replicas(products):
        found[product].append(message)
    return {product: tuple(messages) for product, messages in found.items()}


def _rows_of_a_token(rows: OrderedRows) -> int:
    """How many rows of a layer are copies of one token."""
    entering = (one for node in sorted(rows.inside) for one in rows.operands(node) if not rows.is_ordered(one))
    return next((found[1] for found in map(copied_tokens, entering) if found is not None), 1)


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
