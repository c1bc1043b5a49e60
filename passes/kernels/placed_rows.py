"""Products whose experts a plan places count them as they lie: the ids of their rows are places.

    y = expert_linear(x, w, ids)          places = placed_ids(ids, [0, 2, 3, 1])      order (0, 3, 1, 2)
                                    -->   y = expert_linear(x, w, places)             row 1 of w is that of expert 3

All that rows do from there on is as for experts in their own order: sorted, sent to the rank of a block, masked. What
else reads the ids, as a lookup of biases does, reads those of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from autopar.graphs.expert_loads import module_of
from autopar.passes.kernels.expert_layer import LINEAR, OUTER, behind_inputs, ids_of
from autopar.passes.kernels.graph_patterns import shape_of
from autopar.passes.kernels.ordered_rows import viewed
from autopar.plans.expert_placement import places_of


def count_as_placed(graph: fx.Graph, order: Mapping[str, Sequence[int]]) -> None:
    """Rewrite the products of a lowered graph whose module has an order of its experts, in place; the ids of a layer
    are written once."""
    placed: dict[tuple[fx.Node, tuple[int, ...], str], fx.Node] = {}
    for node in [one for one in graph.nodes if one.target in LINEAR or one.target in OUTER]:
        if (module := module_of(node)) not in order:
            continue
        key = viewed(ids_of(node)), shape_of(ids_of(node)), module
        if key not in placed:
            placed[key] = _places(graph, ids_of(node), order[module], node)
        node.args = (*node.args[:2], placed[key], *node.args[3:])


def _places(graph: fx.Graph, ids: fx.Node, order: Sequence[int], product: fx.Node) -> fx.Node:
    with graph.inserting_before(behind_inputs(ids)):
        node = graph.call_function(torch.ops.autopar.placed_ids.default, (ids, list(places_of(order))))
    node.meta = {key: product.meta[key] for key in ("phase", "operator")}
    node.meta |= {"local_shape": shape_of(ids), "dtype": torch.int64}
    return node
