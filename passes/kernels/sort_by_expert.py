"""Expert products of a layer sort its rows once, and what lies between them stays in that order.

    g = expert_linear(x, w, ids)                       order, places, counts = expert_order(ids, experts, 0)
    h = silu(g)                                        g = sorted_expert_linear(rows_at(x, order), w, counts)
    y = expert_linear(h, v, ids)              -->      h = silu(g)
    z = sum(reshape(mul(y, r), [T / k, k, N]), 1)      y = sorted_expert_linear(h, v, counts)
                                                       m = rows_at(mul(y, rows_at(r, order)), places)
                                                       z = sum(reshape(m, [T / k, k, N]), 1)

Where rows travel to the rank of their expert (`ops/dispatch.py`), they do so where they are put in order, and come back
where they are put back:

    y = dispatched_expert_linear(x, w, ids, there)     order, places, counts = dispatch_order(ids, there)
                                               -->     y = sorted_expert_linear(sent(rows_at(x, order)), w, held)
                                                       y = rows_at(returned(y), places)

How many rows a rank has in between is known when they have come: graphs say as many as the busiest rank expects
(`rows_per_rank.py`), and no call in between names them. Rows of replicated experts stay at home; weights of these are
added up over the ranks, of which one has each and the others zeros, and so are their gradients:

    y = sorted_expert_linear(x, cat(w, all_reduce(replicas_held(w))), held)
    g = with_replicas(h, all_reduce(h[own experts:]))                        h = sorted_expert_outer(x, grad, held)

Forward and backward are rewritten together, so backward reads what forward left in order. Rows that are k copies of a
token are taken from the token. Every rank orders its own rows, by its own block of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.passes.kernels.capped_layer import CappedLayer
from autopar.passes.kernels.chunked_layer import Chunk, can_be_cut, cut_layer
from autopar.passes.kernels.dispatched_layer import DispatchedLayer
from autopar.passes.kernels.expert_layer import LINEAR, OUTER, ExpertLayer, experts_of, ids_of, reads_rows, there_of
from autopar.passes.kernels.in_turns import in_turns
from autopar.passes.kernels.ordered_rows import OrderedRows, viewed
from autopar.passes.kernels.travelling_rows import rows_of_a_token


def sort_by_expert(graph: fx.Graph, axis_names: Sequence[str], chunks: int = 0) -> None:
    """Rewrite every expert product of a lowered graph, in place; what nobody reads any more stays.

    axis_names: of the mesh, over which rows may travel. chunks: into how many layers are cut whose rows do, where they
    can be (`chunked_layer.py`); their calls then take turns, those of one chunk, too (`in_turns.py`). 0: neither.
    """
    layers = _layers(graph)
    every = [product for products in layers for product in products]
    cut = []
    for products in layers:
        cut.append(_in_chunks(graph, products, every, axis_names, chunks))
        every += [product for chunk in cut[-1] for product in chunk.products]
    turns = []
    for parts in cut:
        written = [_layer(graph, chunk.products, every, axis_names, chunk.rows) for chunk in parts]
        for layer in written:
            layer.rewrite()
        turns.append([layer.movements() for layer in written if isinstance(layer, DispatchedLayer)])
    if chunks:
        in_turns(graph, turns)


def _layers(graph: fx.Graph) -> list[list[fx.Node]]:
    """The products of every layer."""
    found: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in LINEAR or node.target in OUTER:
            found.setdefault((viewed(ids_of(node)), experts_of(node), there_of(node)), []).append(node)
    return list(found.values())


def _layer(
    graph: fx.Graph,
    products: list[fx.Node],
    every: list[fx.Node],
    axis_names: Sequence[str],
    rows: OrderedRows | None = None,
) -> ExpertLayer:
    there = there_of(products[0])
    if there is None:
        return ExpertLayer(graph, products, every, rows)
    kind = DispatchedLayer if there.room is None else CappedLayer
    return kind(graph, products, every, there, axis_names, rows)


def _in_chunks(
    graph: fx.Graph, products: list[fx.Node], every: list[fx.Node], axis_names: Sequence[str], chunks: int
) -> list[Chunk]:
    """The chunks of a layer; one where it stays whole."""
    there = there_of(products[0])
    if chunks <= 1 or there is None:
        return [Chunk(products)]
    rows = _layer(graph, products, every, axis_names).rows
    each = rows_of_a_token(one for product in products for one in reads_rows(product).operands)
    if not can_be_cut(there, rows, each, chunks):
        return [Chunk(products)]
    return cut_layer(graph, products, rows, each, chunks)
