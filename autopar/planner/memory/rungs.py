"""Rungs: by which way the values that backward reads of forward come to it, the ladder between memory and seconds.

    kept on the device      31 values    4.2 GiB    stay where forward made them
    recomputed              64 values    8.1 GiB    computed again in backward of their own block
    recomputed in spans     12 values    3.0 GiB    the same in a run of blocks, more than once where runs are nested
    on the host             20 values    5.5 GiB    copied there behind forward, and back in front of backward
    as bits                  8 values    0.1 GiB    made small behind forward, and large in front of backward
    in 4 bits               24 values    0.9 GiB    the same, rounded by chance

A rung is a name. What an operator of a plan says decides (`rung_of`): whether it is recomputed, else where its values
wait, by the plan's own word for it where this table has none, else in which form. `WAITING`, `IN_FORM` and `ADDED_BY`
are all that a further way needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from autopar.graphs.copy_nodes import COPY_FROM_HOST, COPY_TO_HOST
from autopar.graphs.forward_backward import Partition
from autopar.graphs.node_values import VIEWS, is_getitem, node_bytes
from autopar.ops.saved_forms import rounded_by_index
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.lowered_bytes import BACKWARD
from autopar.planner.memory.spans import spans_in
from autopar.plans.plan_value import DEVICE, HOST, OperatorPlan, PlanValue
from autopar.plans.rung_names import IN_FORM, IN_SPANS, KEPT, ON_HOST, RECOMPUTED, STATES_ON_HOST
from autopar.program import returned_values

WAITING: Mapping[str, str] = {DEVICE: KEPT, HOST: ON_HOST}
"""Where values wait that are saved, as a plan says it (`saved_on`) -> rung."""
MAKES_SMALL = frozenset({torch.ops.autopar.pack_bits.default, rounded_by_index})
MAKES_LARGE = frozenset({torch.ops.autopar.unpack_bits.default, torch.ops.autopar.unround_groups.default})
OWN = "that of its operator"
ADDED_BY: Mapping[object, str] = {
    COPY_TO_HOST: ON_HOST,
    COPY_FROM_HOST: ON_HOST,
    **dict.fromkeys(MAKES_SMALL | MAKES_LARGE, OWN),
}
"""Target of a node that a program has for the sake of a rung alone -> that rung."""
ORDER = (KEPT, RECOMPUTED, IN_SPANS, *IN_FORM.values(), ON_HOST, STATES_ON_HOST)
"""How rungs are listed; others behind these."""


class Rungs:
    """Of one plan: which operators and which nodes of its lowered program belong to which rung."""

    def __init__(self, plan: PlanValue, in_spans: Iterable[str] = ()) -> None:
        """in_spans: names of operators that are recomputed with other blocks."""
        inside = frozenset(in_spans)
        self.of_operator = {name: rung_of(entry, name in inside) for name, entry in plan.operators.items()}
        self._recomputed = plan.recomputed
        self._on_host = frozenset(name for name, each in plan.parameters.items() if each.stored_on == HOST)
        self.are_several = bool(plan.recomputed) or bool(self._on_host) or set(self.of_operator.values()) > {KEPT}

    @staticmethod
    def of(plan: PlanValue, lifetimes: Lifetimes) -> Rungs:
        """lifetimes: of the program of which the plan names the operators, whole and by its modules."""
        return Rungs(plan, operators_in_spans(lifetimes, plan.recomputed))

    def made_again(self, node: fx.Node) -> str | None:
        """The rung of a node of a backward graph that computes an operator of forward once more; None for others."""
        name = str(node.meta.get("operator", ""))
        is_call = node.op == "call_function" and "redistributes" not in node.meta and node.target not in ADDED_BY
        return self.of_operator[name] if is_call and name in self._recomputed else None

    def saved(self, node: fx.Node) -> str:
        """The rung of a value that forward hands to backward."""
        name = str(node.meta.get("operator", ""))
        rung = KEPT if name in self._recomputed else self.of_operator.get(name, KEPT)
        return KEPT if rung in IN_FORM.values() and node.target not in MAKES_SMALL else rung

    def added(self, node: fx.Node, in_backward: bool) -> str | None:
        """The rung for whose sake a program has a node; None where it would have it in any case."""
        rung = ADDED_BY.get(node.target)
        if rung is not None:
            name = str(node.meta.get("operator", node.name))
            if rung == OWN:
                return self.of_operator.get(name, KEPT)
            moves_parameter = name in self._on_host or name.endswith(BACKWARD)
            return STATES_ON_HOST if rung == ON_HOST and moves_parameter else rung
        return self.made_again(node) if in_backward else None


def rung_of(entry: OperatorPlan, in_span: bool) -> str:
    """By which way backward comes to what it reads of an operator."""
    if entry.recompute:
        return IN_SPANS if in_span else RECOMPUTED
    if entry.saved_on == DEVICE and entry.saved_as in IN_FORM:
        return IN_FORM[entry.saved_as]
    return WAITING.get(entry.saved_on, entry.saved_on)


def operators_in_spans(lifetimes: Lifetimes, recomputed: frozenset[str]) -> frozenset[str]:
    """Of the recomputed operators those that can only be made again with other segments than their own."""
    if not recomputed:
        return frozenset()
    joined = lifetimes.joined(spans_in(lifetimes, recomputed))
    names = {str(node.meta["operator"]): segment for node, segment in joined.segment.items()}
    return frozenset(name for name in recomputed if name in names and joined.is_span(names[name]))


def bytes_by_rung(rungs: Rungs, partition: Partition, states_on_host: float = 0.0) -> dict[str, float]:
    """Bytes of what backward reads of forward, each value once, of one rank and one micro-batch. partition: lowered;
    states_on_host: what parameters hold there with all that belongs to them."""
    found: dict[str, float] = {}
    returned = returned_values(partition.forward.graph)
    for node, value in zip(returned[len(returned) - len(partition.saved) :], partition.saved, strict=True):
        if not value.is_input:
            rung = rungs.saved(node)
            found[rung] = found.get(rung, 0.0) + value.bytes
    if partition.backward is not None:
        for rung, size in _made_again(rungs, partition.backward.graph):
            found[rung] = found.get(rung, 0.0) + size
    if states_on_host:
        found[STATES_ON_HOST] = states_on_host
    return in_order(found)


def _made_again(rungs: Rungs, graph: fx.Graph) -> Iterable[tuple[str, float]]:
    """(rung, bytes) of the values that backward makes again and reads; one that is made several times counts once."""
    found: dict[tuple[str, object], tuple[str, float]] = {}
    read: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        own = rungs.made_again(node)
        if any(_is_of_backward(user) or (user in read and _hands_on(rungs, user)) for user in node.users):
            read.add(node)
        if own is not None and node in read and node.target not in VIEWS and node_bytes(node):
            key = str(node.meta["operator"]), node.args[1] if is_getitem(node) else 0
            found[key] = own, float(node_bytes(node))
    return found.values()


def _hands_on(rungs: Rungs, node: fx.Node) -> bool:
    """Whether a node looks at a value, moves or takes it, and computes nothing of it."""
    return node.target in VIEWS or is_getitem(node) or rungs.made_again(node) is None


def _is_of_backward(node: fx.Node) -> bool:
    return str(node.meta.get("operator", "")).endswith(BACKWARD)


def in_order(sizes: Mapping[str, float]) -> dict[str, float]:
    """By rung, in the order of the ladder."""
    known = [rung for rung in ORDER if rung in sizes]
    return {rung: sizes[rung] for rung in (*known, *(rung for rung in sizes if rung not in ORDER))}
