"""Sub-meshes of a pipeline search: each number of micro-batches and size of a rank group is priced and solved once.

    shapes = SubMeshes(query, recapture)
    for sub in shapes.of(8, 4): ...        8 micro-batches, groups of 4 devices: one mesh of (4,), one of (2, 2)

The program of a micro-batch is solved without a memory limit, and never lowered: what a stage holds follows from its
blocks. Pipelines of any number of groups share what was solved for their size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_models.collective_costs import collective_seconds
from autopar.errors import InfeasibleError
from autopar.hardware.cluster import Cluster, Link
from autopar.hardware.group_topology import GroupTopology
from autopar.hardware.rank_groups import cluster_of
from autopar.layouts.placement import Mesh
from autopar.planner.batch.batch_flow import NotSeparable
from autopar.planner.batch.micro_batch_program import Recapture
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.meshes.choose_micro_batches import in_parts_of
from autopar.planner.meshes.mesh_shapes import resolve_meshes
from autopar.planner.one_mesh.mesh_plan import price, solve_free
from autopar.planner.one_mesh.query import Query
from autopar.planner.one_mesh.restrict import ImpossiblePlacement
from autopar.planner.pipelines.block_costs import Solved, weight_operators
from autopar.planner.pipelines.block_table import MODES, BlockTable
from autopar.planner.pipelines.runs import Runs, find_runs
from autopar.planner.pipelines.submesh import tables_of
from autopar.planner.problem.constraint_targets import named_axes
from autopar.planner.problem.limits import LIMITS
from autopar.planner.problem.prices import Prices
from autopar.planner.solver import Solution, is_forbidden
from autopar.request.constraints import Recompute


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SubMesh:
    """One mesh of a rank group. query: of one micro-batch on it."""

    query: Query
    solved: Solved
    solution: Solution
    runs: Runs
    tables: Sequence[BlockTable]
    """Of parameters gathered once per step, where that differs, and for every micro-batch."""

    @property
    def table(self) -> BlockTable:
        """Of parameters gathered for every micro-batch."""
        return self.tables[-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    query: Query
    lifetimes: Lifetimes
    runs: Runs


class SubMeshes:
    """query: of the whole batch on the whole cluster."""

    def __init__(self, query: Query, recapture: Recapture) -> None:
        self.query = query
        self._recapture = recapture
        self._parts: dict[int, _Part | NotSeparable] = {}
        self._found: dict[tuple[int, Mesh], SubMesh | None] = {}
        self._group, self._across = 0, None

    _across: Link | None

    def in_part(self, query: Query, group: int, across: Link) -> SubMeshes:
        """Of one part of a cluster of several kinds, whose whole the caller's query is not asked for; programs in
        micro-batches are shared. query: on the part; group: its number; across: the link to other parts."""
        made = SubMeshes(query, self._recapture)
        made._parts, made._group, made._across = self._parts, group, across
        return made

    @property
    def cluster(self) -> Cluster:
        """The whole cluster, of which groups take a part."""
        return self.query.cluster

    @property
    def budget_bytes(self) -> float:
        """What a device may hold."""
        return self.query.budget_bytes

    def of(self, count: int, devices: int) -> Iterator[SubMesh]:
        """The meshes of groups of so many devices, for a batch in `count` parts, one by one. Raises NotSeparable where
        the batch cannot be cut so, and ConfigurationError where nodes cannot."""
        cluster = cluster_of(self.query.cluster, devices)
        self._part(count)
        for mesh in few_meshes(cluster):
            found = self.on_mesh(count, mesh)
            if found is not None:
                yield found

    def on_mesh(self, count: int, mesh: Mesh) -> SubMesh | None:
        """One mesh of the caller's choice, None where the constraints leave nothing on it, or name an axis that it does
        not have. Raises as `of` does."""
        if not named_axes(self.query.constraints.placements).keys() <= set(mesh.axis_names):
            return None
        if (count, mesh) not in self._found:
            part, cluster = self._part(count), cluster_of(self.query.cluster, mesh.size)
            query = replace(part.query, cluster=cluster, budget_bytes=self.query.budget_bytes)
            self._found[count, mesh] = self._solve(query, part, mesh)
        return self._found[count, mesh]

    def known(self, count: int) -> list[SubMesh]:
        """Everything that was solved for a number of micro-batches."""
        return [sub for (parts, _), sub in self._found.items() if parts == count and sub is not None]

    def _part(self, count: int) -> _Part:
        if count not in self._parts:
            try:
                micro = self.query.in_parts(count, self._recapture)
            except NotSeparable as reason:
                self._parts[count] = reason
            else:
                query = replace(in_parts_of(self.query, micro), warm_start=None, recompute=None)
                lifetimes = Lifetimes(query.program)
                self._parts[count] = _Part(query=query, lifetimes=lifetimes, runs=find_runs(lifetimes))
        found = self._parts[count]
        if isinstance(found, NotSeparable):
            raise found
        return found

    def _solve(self, query: Query, part: _Part, mesh: Mesh) -> SubMesh | None:
        """None where the constraints leave nothing on this mesh."""
        seconds = min(query.search.exact_seconds, LIMITS.sub_mesh_seconds)
        query = replace(query, search=replace(query.search, exact_seconds=seconds))
        try:
            built = price(query, mesh)
            solution = solve_free(query, built, mesh)
        except (InfeasibleError, ImpossiblePlacement):
            return None
        if is_forbidden(np.asarray(solution.objective)):
            return None
        plain = price(replace(query, micro=None), mesh)
        solved = Solved(
            built=plain,
            labels=np.asarray(solution.assignment, dtype=np.int64),
            mesh=mesh,
            prices=Prices(query.cluster, mesh),
            state_bytes=query.state_bytes,
            lifetimes=part.lifetimes,
            weights=weight_operators(query.program, part.lifetimes),
        )
        whole = self.query.cluster
        modes: tuple[Recompute, ...] | tuple[str, ...] = (
            MODES if self.query.recompute is None else (self.query.recompute,)
        )
        tables = tables_of(self.query, query, solved, part.runs, whole.num_devices // mesh.size, modes)
        if self._across is not None:
            tables = [self._with_other_parts(table, whole, self._across) for table in tables]
        return SubMesh(query=query, solved=solved, solution=solution, runs=part.runs, tables=tables)

    def _with_other_parts(self, table: BlockTable, cluster: Cluster, across: Link) -> BlockTable:
        """The table with its place among the parts; every device sends to its peer in another one at the same time."""
        topology = GroupTopology(
            ranks=2, nodes=2, ranks_per_node=1, groups_per_node=min(table.devices, cluster.devices_per_node)
        )
        linked = replace(cluster, inter_link=across)
        seconds = collective_seconds("neighbours", table.send_bytes, topology, linked)
        return replace(table, group=self._group, across_seconds=seconds)


def few_meshes(cluster: Cluster) -> list[Mesh]:
    """One axis; and two: across nodes and inside, or halves of a node."""
    every = [mesh for mesh in resolve_meshes(cluster, None, None) if len(mesh.shape) <= 2]
    inner = cluster.devices_per_node if cluster.num_nodes > 1 else cluster.devices_per_node // 2
    two = [mesh for mesh in every if len(mesh.shape) == 2 and mesh.shape[1] == inner]
    return [*two[:1], *(mesh for mesh in every if len(mesh.shape) == 1)]
