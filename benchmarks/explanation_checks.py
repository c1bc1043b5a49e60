"""Two evaluators, beside what explains, of what an explanation says that switching costs.

    raw_optimum(problem, rows, forbidden)       the one-hot program, written out and given to HiGHS: small graphs
    recounted(query, mesh, built, labels)       seconds of an assignment, operator by operator and collective by
                                                collective, from its layouts: graphs of any size

The first proves that no plan without the choice is cheaper; it takes the tables of the problem as they are. The second
takes none of them: it says that tables, routes, classes of equal entries and labels are what the layouts cost. What it
shares with the planner:

- the skeleton: which tensors are redistributed from whom to whom, behind which views (read again, by the same code);
- seconds of an operator in a layout (`Prices.operator_costs`), of the optimizer and of tie-breaks;
- seconds of one collective of given kind, bytes and group, and of a copy (`cost_models`, compared with measurements by
  `benchmarks.validation`).

A redistribution that moves one axis alone is worked out here (`_one_axis`): which collective, how many bytes, which
group. Others, with nested or uneven blocks or several axes, take their steps from the lowering's finder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver.python import model_builder

from autopar.cost_models.collective_costs import CollectiveKind, collective_seconds
from autopar.cost_models.operator_costs import copy_seconds, optimizer_seconds
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.layouts.placement import Layout, Mesh, Partial, Placement, Replicate, Shard, replicated
from autopar.layouts.redistribution import redistribution_steps
from autopar.passes.view_layouts import layout_before_view
from autopar.planner.memory.recomputation import RECOMPUTED, state_of
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.equivalence import OperatorEquivalence
from autopar.planner.problem.factorisation import Factorisation, shape_of
from autopar.planner.problem.prices import Prices, tensor_bytes
from autopar.planner.problem.read_skeleton import skeleton_of
from autopar.planner.problem.skeleton import Skeleton, SlotLink
from autopar.planner.problem.strategies import LayoutSet, local_fraction
from autopar.planner.solver import MemoryRow, Problem, is_forbidden

Flags = NDArray[np.bool_]
new_model: Callable[[], model_builder.Model] = model_builder.Model
"""The library's constructor has no types."""
MOST_VARIABLES = 150_000
"""Of a one-hot program that is written out."""


def raw_variables(problem: Problem) -> int:
    """Variables of `raw_optimum`."""
    return sum(costs.size for costs in problem.node_costs) + sum(edge.costs.size for edge in problem.edges)


def raw_optimum(problem: Problem, rows: Sequence[MemoryRow], forbidden: Mapping[int, Flags], seconds: float) -> float:
    """The least seconds of any assignment that avoids forbidden labels and keeps the rows, by HiGHS.

    Raises RuntimeError where it is not proven within `seconds`.
    """
    model = new_model()
    chosen = [[model.new_bool_var("") for _ in costs] for costs in problem.node_costs]
    terms: list[model_builder.LinearExprT] = []
    for node, (variables, costs) in enumerate(zip(chosen, problem.node_costs, strict=True)):
        never = is_forbidden(costs) | forbidden.get(node, np.zeros(len(costs), dtype=bool))
        model.add(sum(variables) == 1)
        for variable, cost, is_out in zip(variables, costs.tolist(), never.tolist(), strict=True):
            if is_out:
                model.add(variable == 0)
            elif cost:
                terms.append(cost * variable)
    for edge in problem.edges:
        terms += _edge_terms(model, chosen[edge.source], chosen[edge.target], edge.costs)
    for row in rows:
        held = [
            size * variable
            for node, sizes in row.bytes.items()
            for size, variable in zip((sizes / row.budget_bytes).tolist(), chosen[node], strict=True)
            if size
        ]
        model.add(sum(held) <= 1.0 - row.constant_bytes / row.budget_bytes)
    model.minimize(model_builder.LinearExpr.sum([1e3 * term for term in terms]))
    solver = model_builder.Solver("highs")
    solver.set_time_limit_in_seconds(seconds)
    status = solver.solve(model)
    if status != model_builder.SolveStatus.OPTIMAL:
        raise RuntimeError(f"HiGHS did not prove the optimum in {seconds} s: {status}")
    return float(solver.objective_value) / 1e3


def _edge_terms(
    model: model_builder.Model,
    sources: Sequence[model_builder.Variable],
    targets: Sequence[model_builder.Variable],
    costs: NDArray[np.float64],
) -> list[model_builder.LinearExprT]:
    """Cost of the pair that an edge takes: one variable per pair, tied to both ends by sums."""
    never = is_forbidden(costs)
    pairs = [[model.new_num_var(0.0, 0.0 if out else 1.0, "") for out in row] for row in never.tolist()]
    for source, row in zip(sources, pairs, strict=True):
        model.add(sum(row) == source)
    for target, column in zip(targets, zip(*pairs, strict=True), strict=True):
        model.add(sum(column) == target)
    return [
        float(cost) * pair
        for row, line in zip(pairs, costs.tolist(), strict=True)
        for pair, cost in zip(row, line, strict=True)
        if cost and not is_forbidden(np.asarray(cost))
    ]


def recounted(query: Query, mesh: Mesh, built: Built, labels: Sequence[int]) -> float:
    """Seconds of an assignment without recomputation, from its layouts."""
    return Recount(query, mesh, built, labels).seconds()


class Recount:
    """One assignment, priced from a new skeleton and new prices. own, found: redistributions that were worked out here,
    and those that took their steps from the lowering's finder."""

    def __init__(self, query: Query, mesh: Mesh, built: Built, labels: Sequence[int]) -> None:
        self.query, self.mesh, self.built, self.labels = query, mesh, built, labels
        self.prices = Prices(query.cluster, mesh)
        self.skeleton: Skeleton = skeleton_of(query.program, query.kernel_backend, Factorisation(query.program))
        self.count = 1 if query.micro is None else query.micro.count
        self.own = self.found = 0

    def seconds(self) -> float:
        nodes = [self._node(index, variable) for index, variable in enumerate(self.built.variables)]
        return math.fsum([*nodes, *map(self._link, self.skeleton.links)])

    def _node(self, index: int, variable: Variable) -> float:
        label, slot = self.labels[index], self.skeleton.slots[index]
        if state_of(variable, label) == RECOMPUTED:
            raise ValueError(f"{variable.name} is computed again: this counts plans that recompute nothing")
        if variable.kind == "parameter":
            return self._parameter(variable, label)
        if variable.strategies is None:
            return float(variable.costs[label])  # a tie-break at most
        equivalence = self.skeleton.equivalences[slot.equivalence]
        assert isinstance(equivalence, OperatorEquivalence)
        one = variable.strategies.take(np.array([label]))
        implementation = next(i for i in equivalence.implementations if i.name == one.implementation(0))
        seconds = float(
            self.prices.operator_costs(
                equivalence.node,
                implementation.rule,
                one,
                equivalence.traffic,
                equivalence.leads_kernel,
                equivalence.kernel_share,
                runs_as=implementation.target,
            )[0]
        )
        for output, tensor in slot.tolls:
            made = _at(variable.layouts[output], label)
            seconds += self._moved(tensor, made, replicated(len(self.mesh.shape)))
        return seconds * self.count

    def _parameter(self, variable: Variable, label: int) -> float:
        choice, shape = variable.labels[label], shape_of(variable.node)
        state = self.query.state_bytes[variable.name]
        touched = state.step_traffic * math.prod(shape) * local_fraction(choice.stored, shape, self.mesh)
        ties = zip(self.prices.tie_breaks, choice.stored, strict=True)
        seconds = float(optimizer_seconds(self.query.cluster.device, touched, state.step_curve))
        seconds += float(sum(tie for tie, placed in ties if placed != Replicate()))
        gather = self._steps(shape, tensor_bytes(variable.node), choice.stored, choice.used)
        return seconds + gather * self.count * (1.0 - self.query.hidden_share)

    def _link(self, link: SlotLink) -> float:
        source, target = self.built.variables[link.source], self.built.variables[link.target]
        made = _at(source.layouts[link.output], self.labels[link.source])
        wanted: Layout | None = _at(_wanted(target, link.port), self.labels[link.target])
        for view in self.skeleton.views[link.views]:
            assert wanted is not None
            wanted = layout_before_view(view, wanted, self.mesh)
        assert wanted is not None
        is_hidden = "parameter" in (source.kind, target.kind)
        counted = 1.0 - self.query.hidden_share if is_hidden else 1.0
        return self._moved(link.tensor, made, wanted) * self.count * counted

    def _moved(self, tensor: int, source: Layout, target: Layout) -> float:
        equivalence = self.skeleton.tensors[tensor]
        return self._steps(equivalence.shape, equivalence.nbytes, source, target)

    def _steps(self, shape: tuple[int, ...], nbytes: int, source: Layout, target: Layout) -> float:
        ties = zip(self.prices.tie_breaks, source, target, strict=True)
        tie = float(sum(tie for tie, before, after in ties if before != after))
        if source == target:
            return tie
        seconds = _one_axis(shape, nbytes, source, target, self.mesh, self.query.cluster)
        if seconds is not None:
            self.own += 1
            return seconds + tie
        self.found += 1
        steps = redistribution_steps(shape, source, target, self.mesh)
        return math.fsum(self.prices.step_seconds(step, nbytes) for step in steps) + tie


def _one_axis(
    shape: Sequence[int], nbytes: int, source: Layout, target: Layout, mesh: Mesh, cluster: Cluster
) -> float | None:
    """Seconds of a redistribution that moves one axis, whose blocks are even and share no dim with another axis; None
    of any other.

        S -> R      all_gather of what the other axes leave of the tensor
        P -> R      all_reduce of it
        P -> S      reduce_scatter of it
        S -> S'     all_to_all of one block
        R -> S      a copy of the block
    """
    axes = [axis for axis, (before, after) in enumerate(zip(source, target, strict=True)) if before != after]
    if len(axes) != 1:
        return None
    axis, ranks = axes[0], mesh.shape[axes[0]]
    before, after = source[axis], target[axis]
    moved = [placement for placement in (before, after) if isinstance(placement, Shard)]
    others = [(other, p) for other, p in enumerate(source) if other != axis and isinstance(p, Shard)]
    dims = {shard.dim for shard in moved}
    if len(dims) < len(moved) or dims & {shard.dim for _, shard in others}:
        return None
    if any(shape[shard.dim] // shard.split % ranks or shape[shard.dim] % shard.split for shard in moved):
        return None
    kept = nbytes / math.prod(mesh.shape[other] for other, _ in others)  # what the other axes leave
    if isinstance(before, Replicate):
        return float(copy_seconds(cluster.device, kept / ranks))
    kind = _COLLECTIVES[type(before), type(after)]
    sent = kept / ranks if kind == "all_to_all" else kept
    seconds = float(collective_seconds(kind, sent, GroupTopology.of(cluster, mesh.shape, (axis,)), cluster))
    strided = any(shard != Shard(0) for shard in moved)  # blocks of any other dim are no ranges of memory
    return seconds + (float(copy_seconds(cluster.device, sent, transposing=True)) if strided else 0.0)


_COLLECTIVES: Mapping[tuple[type[Placement], type[Placement]], CollectiveKind] = {
    (Shard, Replicate): "all_gather",
    (Partial, Replicate): "all_reduce",
    (Partial, Shard): "reduce_scatter",
    (Shard, Shard): "all_to_all",
}


def _wanted(variable: Variable, port: int) -> LayoutSet | None:
    if variable.strategies is not None:
        return variable.strategies.inputs[port]
    return variable.stored if variable.kind == "parameter" else variable.layouts[0]


def _at(layouts: LayoutSet | None, label: int) -> Layout:
    assert layouts is not None
    return layouts.distinct[layouts.index[label]]
