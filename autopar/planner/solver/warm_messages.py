"""Messages that outlive a solve: by edge and by original label, so that they fit the same edge of a similar problem.

    (u, v) -> labels of u, messages into u (one per label), labels of v, messages into v

`Solution.messages` are those of the first core, before labels were fixed. After one node's costs change, nearly all of
them are still nearly right; `load` takes what fits, by nodes and labels. Any messages are a valid start.
"""

from __future__ import annotations

import numpy as np

from autopar.planner.solver.dual_ascent import DualAscent
from autopar.planner.solver.labelling import Floats, Integers
from autopar.planner.solver.reductions import Graph
from autopar.planner.solver.solution import Warmth


def save(ascent: DualAscent, nodes: list[int], graph: Graph) -> Warmth:
    """Return the messages of `ascent`, whose core has these `nodes` of `graph`."""
    saved: Warmth = {}
    for edge, (u, v, _) in enumerate(ascent.core.edges):
        start, end = ascent.message_starts[edge], ascent.message_starts[edge + 1]
        middle = start + ascent.sizes[u]
        saved[nodes[u], nodes[v]] = (
            graph.domains[nodes[u]],
            ascent.messages[start:middle].copy(),
            graph.domains[nodes[v]],
            ascent.messages[middle:end].copy(),
        )
    return saved


def load(ascent: DualAscent, nodes: list[int], graph: Graph, warmth: Warmth) -> None:
    """Set the messages of edges that are known; a label that is not known starts from the mean of the others."""
    for edge, (u, v, _) in enumerate(ascent.core.edges):
        known = warmth.get((nodes[u], nodes[v]))
        if known is None:
            continue
        labels_u, into_u, labels_v, into_v = known
        start, end = ascent.message_starts[edge], ascent.message_starts[edge + 1]
        middle = start + ascent.sizes[u]
        ascent.messages[start:middle] = _pick(labels_u, into_u, graph.domains[nodes[u]])
        ascent.messages[middle:end] = _pick(labels_v, into_v, graph.domains[nodes[v]])


def _pick(labels: Integers, messages: Floats, wanted: Integers) -> Floats:
    if len(labels) == len(wanted) and (labels == wanted).all():
        return messages
    places = np.minimum(np.searchsorted(labels, wanted), len(labels) - 1)
    return np.where(labels[places] == wanted, messages[places], messages.mean())
