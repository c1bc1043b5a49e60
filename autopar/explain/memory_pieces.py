"""Pieces of memory: whose buffers live at one node of a lowered program, and of which kind they are.

    pieces_at(lowered, partition, ranges, 17)      ("layers.3.up/mm#0", "activations saved for backward", 8.4e6), ...

Counted buffer by buffer (`graphs/live_ranges.py`); parameters and what belongs to them are not among them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

from torch import fx

from autopar.graphs.copy_nodes import copy_direction
from autopar.graphs.forward_backward import Partition
from autopar.graphs.live_ranges import LiveRange
from autopar.planner.memory.rungs import Rungs
from autopar.plans.plan_text import without_numbers
from autopar.plans.rung_names import KEPT, ON_HOST
from autopar.program import Program, returned_values

PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer state", "gradients"
SAVED, GATHERED, MOVED, WORKING = (
    "activations saved for backward", "gathered parameters", "moved by collectives", "working values"
)  # fmt: skip
BROUGHT, BROUGHT_PARAMETERS = "brought from the host", "parameters brought from the host"
INPUTS, JOINED, UPDATE = "inputs", "joined outputs", "buffers of the optimizer's step"
OUTSIDE, LOSS = "(outside of modules)", "the loss"


TaggedRange: TypeAlias = tuple[LiveRange, str, str]
"""(when a buffer lives, whose it is, of which kind)"""


def pieces_at(
    lowered: Program, partition: Partition, ranges: Sequence[LiveRange], index: int, rungs: Rungs | None = None
) -> Iterator[tuple[str, str, float]]:
    """(name, kind, bytes) of the buffers that live at an index."""
    for live, name, kind in tagged(lowered, partition, ranges, rungs):
        if live.first_index <= index <= live.last_index:
            yield name, kind, float(live.bytes)


def tagged(
    lowered: Program,
    partition: Partition,
    ranges: Sequence[LiveRange],
    rungs: Rungs | None = None,
    weights: fx.GraphModule | None = None,
) -> list[TaggedRange]:
    """Every buffer of a program with its name and kind; what backward makes again has its rung as kind. weights: the
    half of backward that the partition lacks."""
    forward = [node for node in partition.forward.graph.nodes if node.op != "output"]
    backward = partition.backward
    by_name = [
        {node.name: node for node in forward},
        {node.name: node for graph in (weights, backward) if graph is not None for node in graph.graph.nodes},
    ]
    later = [node for graph in (backward, weights) if graph is not None for node in graph.graph.nodes]
    num_nodes = len(forward) + sum(node.op != "output" for node in later)
    gradients = set() if backward is None else {n for n in returned_values(backward.graph) if isinstance(n, fx.Node)}
    parameters = {entry.name for entry in lowered.inputs if entry.role == "parameter"}
    found = []
    for live in ranges:
        in_backward = live.first_index >= len(forward)
        node = by_name[in_backward].get(live.name) or by_name[not in_backward][live.name]
        crosses = not in_backward and live.last_index >= len(forward)
        kind = _kind(node, crosses, live.last_index >= num_nodes, gradients, parameters)
        if rungs is not None:
            kind = _of_rung(kind, node, in_backward, rungs)
        found.append((live, owner_of(node), kind))
    return found


def _kind(node: fx.Node, crosses: bool, is_returned: bool, gradients: set[fx.Node], parameters: set[str]) -> str:
    copy = node.meta.get("redistributes")
    if node.op == "placeholder" or node.op == "get_attr":
        return INPUTS
    if is_returned and (node in gradients or node.meta.get("phase") == "backward"):
        return GRADIENTS
    if copy_direction(node) == "from_host":
        return BROUGHT_PARAMETERS if owner_of(node) in parameters else BROUGHT
    if owner_of(node) in parameters:
        return GATHERED
    if crosses:
        return SAVED
    return MOVED if copy is not None or getattr(node.target, "namespace", "") == "_c10d_functional" else WORKING


def _of_rung(kind: str, node: fx.Node, in_backward: bool, rungs: Rungs) -> str:
    """The kind of a buffer; that of what backward makes again, or of what is saved in another form, is its rung."""
    if kind == SAVED:
        rung = rungs.saved(node)
        return SAVED if rung in (KEPT, ON_HOST) else rung
    return (in_backward and kind == WORKING and rungs.made_again(node)) or kind


def owner_of(node: fx.Node) -> str:
    """The operator, parameter or input that a node belongs to; "" for others."""
    return str(node.meta.get("operator", node.name if node.op == "placeholder" else ""))


def loss_operators(nodes: Iterable[fx.Node]) -> frozenset[str]:
    """The operators behind the last module of forward, and those of backward before its first: no module runs them, and
    people know them as the loss. nodes: of a whole program in the order in which they run."""
    owners = [owner_of(node) for node in nodes if "/" in owner_of(node)]
    forward = [owner for owner in owners if not owner.endswith("/bwd")]
    backward = [owner for owner in owners if owner.endswith("/bwd")]
    if not any(map(_path, forward)):
        return frozenset()
    return frozenset([*_before_modules(reversed(forward)), *_before_modules(backward)])


def _before_modules(owners: Iterable[str]) -> Iterator[str]:
    return itertools.takewhile(lambda owner: not _path(owner), owners)


def _path(name: str) -> str:
    return name.partition("/")[0] if "/" in name else name.rpartition(".")[0]


def module_of(name: str, loss: Collection[str] = ()) -> str:
    """The module of a parameter or operator, with repeated layers as one. loss: what belongs to the loss."""
    return LOSS if name in loss else without_numbers(_path(name)) or OUTSIDE


def moment_of(nodes: Sequence[fx.Node], index: int, loss: Collection[str] = ()) -> str:
    """ "backward of layers.3.mlp.down_proj (mm)"; "backward of the loss (scatter)"."""
    phase = "backward" if nodes[index].meta.get("phase") == "backward" else "forward"
    owner = owner_of(nodes[index])
    path = _path(owner)
    last = owner.removeprefix(path)[1:].partition("#")[0]
    where = LOSS if owner in loss else path or "what stands outside of modules"
    return f"{phase} of {where} ({last})" if last else f"{phase} of {where}"


def sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Largest first."""
    found: dict[str, list[float]] = {}
    for key, size in pairs:
        found.setdefault(key, []).append(size)
    totals = {key: math.fsum(sizes) for key, sizes in found.items()}
    return {key: size for key, size in sorted(totals.items(), key=lambda item: -item[1]) if size}
