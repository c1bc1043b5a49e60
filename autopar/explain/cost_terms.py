"""Cost terms: the objective of an assignment, taken apart into what a person can argue with.

    lm_head.weight     all_gather over dp_shard     1.2 ms
    lm_head/mm#0       compute                      3.4 ms
                       tie-break                   10 ns       still layouts win where costs are equal

The sum of all terms is the objective. They are counted again from the layouts of the assignment, the steps that the
lowering emits between them (`redistribution_steps`) and the price of each step, not read from the solver's tables; so
the sum is a check of those tables too. A redistribution belongs to the parameter that it moves, else to its reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TypeAlias

from torch import fx

from autopar.explain.answers import Term
from autopar.layouts.placement import Layout, Mesh, Replicate, replicated
from autopar.layouts.redistribution import redistribution_steps
from autopar.passes.view_layouts import layout_before_view
from autopar.planner.memory.recomputation import RECOMPUTED, state_of
from autopar.planner.one_mesh.recovered_problem import Recovered
from autopar.planner.problem.build import Variable
from autopar.planner.problem.equivalence import OperatorEquivalence
from autopar.planner.problem.factorisation import shape_of, value_of
from autopar.planner.problem.prices import TIE_BREAK_SECONDS, Prices, in_zigzag, tensor_bytes
from autopar.planner.problem.read_skeleton import skeleton_of
from autopar.planner.problem.skeleton import Skeleton, SlotLink
from autopar.planner.problem.strategies import LayoutSet, local_fraction
from autopar.rules.alternatives import rule_as
from autopar.rules.engine import tensor_operands

COMPUTE, OPTIMIZER, TIE_BREAK = "compute", "optimizer", "tie-break"
Parts: TypeAlias = list[tuple[str, tuple[str, ...], float]]
"""(kind, names of axes, seconds)"""


def cost_terms(recovered: Recovered) -> list[Term]:
    """All terms of a plan, in the order of its decisions; their sum is `recovered.objective`."""
    return list(_Counter(recovered).terms())


class _Counter:
    """Counts one assignment."""

    def __init__(self, recovered: Recovered) -> None:
        self.mesh: Mesh = recovered.mesh
        self.query = query = recovered.query
        self.prices = Prices(query.cluster, self.mesh)
        self.count = 1 if query.micro is None else query.micro.count
        self.built = recovered.built
        self.labels: Sequence[int] = recovered.labels.tolist()
        self.skeleton: Skeleton = skeleton_of(query.program, query.kernel_backend, query.factorisation)
        self._steps: dict[tuple[object, ...], Parts] = {}

    def terms(self) -> Iterator[Term]:
        for index, variable in enumerate(self.built.variables):
            if variable.kind == "operator":
                yield from self._operator(index, variable)
            elif variable.kind == "parameter":
                yield from self._parameter(index, variable)
            else:
                yield from _remainder(self._owner(index), TIE_BREAK, float(variable.costs[self.labels[index]]), [])
        for number, link in enumerate(self.skeleton.links):
            yield from self._link(number, link)

    # decisions

    def _operator(self, index: int, variable: Variable) -> Iterator[Term]:
        label, node = self.labels[index], variable.node
        assert variable.strategies is not None
        times = self.count * (2 + len(variable.anew) if state_of(variable, label) == RECOMPUTED else 1)
        axes = variable.strategies.axes[label]
        own = [*self._synchronised(node, axes), *self._exchanged(node, variable, label)]
        own += self._dispatched(index, variable, label)
        for output, tensor in self.skeleton.slots[index].tolls:
            offered = variable.layouts[output]
            own += self._moved(tensor, _at(offered, label), replicated(len(self.mesh.shape)), ())
        is_split = [name is not None for name in axes]
        own.append((TIE_BREAK, (), 0.5 * float(sum(t for t, s in zip(self.prices.tie_breaks, is_split, strict=True)
                                                   if not s))))  # fmt: skip
        found = [Term(variable.name, kind, over, seconds * times) for kind, over, seconds in own if seconds]
        rest = float(variable.costs[label]) - math.fsum(term.seconds for term in found)
        found += [
            Term(variable.name, kind, over, seconds * times)
            for kind, over, seconds in self._ring(node, variable, label, rest / times)
        ]
        yield from found
        yield from _remainder(variable.name, COMPUTE, float(variable.costs[label]), found)

    def _parameter(self, index: int, variable: Variable) -> Iterator[Term]:
        """The optimizer's step, and one gather where it is kept: as much of it as the prices count."""
        choice, total = variable.labels[self.labels[index]], float(variable.costs[self.labels[index]])
        shape, nbytes = shape_of(variable.node), tensor_bytes(variable.node)
        held = math.prod(shape) * local_fraction(choice.stored, shape, self.mesh)
        step = self.query.state_bytes[variable.name].step_seconds(self.query.cluster.device, held)
        ties = zip(self.prices.tie_breaks, choice.stored, strict=True)
        own = [
            Term(variable.name, OPTIMIZER, (), float(step)),
            Term(variable.name, TIE_BREAK, (), float(sum(tie for tie, placed in ties if placed != Replicate()))),
        ]
        yield from (term for term in own if term.seconds)
        rest = total - math.fsum(term.seconds for term in own)
        gather = self._redistribution(shape, nbytes, choice.stored, choice.used)
        once = math.fsum(seconds for _, _, seconds in gather)
        yield from (Term(variable.name, kind, over, seconds * rest / once) for kind, over, seconds in gather)

    def _synchronised(self, node: fx.Node, axes: Sequence[str | None]) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Statistics that the ranks of one operator add up, as a normalisation over split rows does."""
        rule = self.built.rules.get(node)
        for name, nbytes in rule.synchronised_bytes.items() if rule is not None else ():
            over = tuple(axis for axis, chosen in enumerate(axes) if chosen == name)
            if over:
                yield "all_reduce", self._names(over), self.prices.collective_seconds("all_reduce", over, nbytes)

    def _exchanged(self, node: fx.Node, variable: Variable, label: int) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Edges of blocks that neighbouring ranks of a convolution exchange."""
        rule, strategies = self.built.rules.get(node), variable.strategies
        assert strategies is not None
        for name, nbytes in rule.exchanged_bytes.items() if rule is not None else ():
            over = tuple(axis for axis, chosen in enumerate(strategies.axes[label]) if chosen == name)
            if over and nbytes:
                assert rule is not None
                index = max(i for i, dims in enumerate(rule.inputs) if any(name in dim for dim in dims))
                shape = shape_of(*value_of(tensor_operands(node)[index]))
                part = local_fraction(_at(strategies.inputs[index], label), shape, self.mesh)
                row = round(nbytes * part * math.prod(self.mesh.shape[axis] for axis in over))
                yield "neighbours", self._names(over), self.prices.collective_seconds("neighbours", over, row)

    def _dispatched(
        self, index: int, variable: Variable, label: int
    ) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Rows that travel to their experts and back, and experts that are replicated."""
        node, strategies = variable.node, variable.strategies
        assert strategies is not None
        equivalence = self.skeleton.equivalences[self.skeleton.slots[index].equivalence]
        exchanges = equivalence.exchanges if isinstance(equivalence, OperatorEquivalence) else ()
        rule = self.built.rules.get(node)
        over = () if rule is None else tuple(a for a, name in enumerate(strategies.axes[label]) if name in rule.pairs)
        if rule is not None and over:
            found = self.prices.exchanged(node, rule, strategies, exchanges)
            for message, seconds in zip(exchanges, found, strict=True):
                yield message.collective, self._names(over), float(seconds[label])

    def _ring(
        self, node: fx.Node, variable: Variable, label: int, seconds: float
    ) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """What a ring adds to the computation, of `seconds` of both."""
        strategies = variable.strategies
        assert strategies is not None
        rule, axes = rule_as(node, strategies.implementation(label)), strategies.axes[label]
        for name, traffic in rule.ring_traffic.items() if rule is not None else ():
            over = tuple(axis for axis, chosen in enumerate(axes) if chosen == name)
            if over:
                turned = in_zigzag(_at(strategies.inputs[0], label))
                ring = self.prices.ring_part(traffic, name, axes, seconds, turned)
                yield "neighbours", self._names(over), ring

    # redistributions

    def _link(self, number: int, link: SlotLink) -> Iterator[Term]:
        edge = self.built.problem.edges[number]
        seconds = float(edge.costs[self.labels[link.source], self.labels[link.target]])
        if not seconds:
            return
        source = _at(self.built.variables[link.source].layouts[link.output], self.labels[link.source])
        target = _at(self._wanted(link), self.labels[link.target])
        moved = self._moved(link.tensor, source, target, self.skeleton.views[link.views])
        once = sum(cost for _, _, cost in moved)
        name = self._owner_of_link(link)
        for kind, over, cost in moved:
            yield Term(name, kind, over, cost * seconds / once)

    def _wanted(self, link: SlotLink) -> LayoutSet | None:
        variable = self.built.variables[link.target]
        if variable.strategies is not None:
            return variable.strategies.inputs[link.port]
        return variable.stored if variable.kind == "parameter" else variable.layouts[0]

    def _moved(self, tensor: int, source: Layout, target: Layout, views: Iterable[fx.Node]) -> Parts:
        wanted: Layout | None = target
        for view in views:
            wanted = None if wanted is None else layout_before_view(view, wanted, self.mesh)
        assert wanted is not None, "what a view cannot express is forbidden"
        one = self.skeleton.tensors[tensor]
        return self._redistribution(one.shape, one.nbytes, source, wanted)

    def _redistribution(self, shape: tuple[int, ...], nbytes: int, source: Layout, target: Layout) -> Parts:
        """(kind, axes, seconds) of the steps between two layouts, and the tie-break of the axes that change."""
        key = (shape, nbytes, source, target)
        if key not in self._steps:
            steps = redistribution_steps(shape, source, target, self.mesh)
            found = [(step.kind, self._names(step.axes), self.prices.step_seconds(step, nbytes)) for step in steps]
            ties = zip(self.prices.tie_breaks, source, target, strict=True)
            tie = float(sum(seconds for seconds, before, after in ties if before != after))
            self._steps[key] = [(str(k), axes, s) for k, axes, s in found] + ([(TIE_BREAK, (), tie)] if tie else [])
        return self._steps[key]

    def _owner_of_link(self, link: SlotLink) -> str:
        """The parameter that a link moves, forward or as a gradient; else who reads."""
        source = self._behind_copies(link.source)
        if self.built.variables[source].kind == "parameter":
            return self.built.variables[source].name
        return self._owner(link.target)

    def _owner(self, index: int) -> str:
        """Whom a decision belongs to: a shared copy to whoever makes the tensor."""
        return self.built.variables[self._behind_copies(index)].name

    def _behind_copies(self, index: int) -> int:
        while self.built.variables[index].kind == "copy":
            index = self._source_of_copy[index]
        return index

    @cached_property
    def _source_of_copy(self) -> dict[int, int]:
        return {slot: into.source for slot, (into, _) in self.skeleton.copies_of.items()}

    def _names(self, axes: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.mesh.axis_names[axis] for axis in axes)


def _at(layouts: LayoutSet | None, label: int) -> Layout:
    assert layouts is not None, "only tensors are moved"
    return layouts.distinct[layouts.index[label]]


def _remainder(name: str, kind: str, total: float, counted: Sequence[Term]) -> Iterator[Term]:
    rest = total - math.fsum(term.seconds for term in counted)
    if abs(rest) > TIE_BREAK_SECONDS * 1e-3:
        yield Term(name, kind, (), rest)
