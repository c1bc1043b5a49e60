"""Stage problem: a plan with equal stages as an assignment of its sub-mesh's problem again, and as the step it plays.

    problem = stage_problem(source, plan)
    problem.recovered.labels              the layouts of the program of one micro-batch, on the mesh of one rank group
    problem.played(plan).step_seconds     plan.predicted.step_seconds, where the prices are still the same

The planner solves the program of one micro-batch on one sub-mesh, reads the solution as costs of blocks, cuts these
into stages and plays a schedule (`planner/pipelines`). Asked again, the cut, the recomputation of every stage and the
schedule are those of the plan, so a change of layouts, cut or schedule has a price without any search.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_models.schedule_player import play_pipeline, schedule_for
from autopar.errors import ConfigurationError, PlanMismatchError
from autopar.explain.recovered import query_of
from autopar.explain.source import Source
from autopar.hardware.cluster import MixedCluster
from autopar.hardware.rank_groups import sub_cluster
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.nested_spans import joined_by
from autopar.planner.memory.recomputation import ON_HOST, RECOMPUTED, state_of
from autopar.planner.meshes.choose_micro_batches import in_parts_of
from autopar.planner.one_mesh.mesh_plan import price
from autopar.planner.one_mesh.query import Query
from autopar.planner.one_mesh.recovered_problem import Recovered, recover
from autopar.planner.one_mesh.warm_start import Rows
from autopar.planner.pipelines.block_costs import Labels, Solved, weight_operators
from autopar.planner.pipelines.block_table import HOST_MODES, MODES, BlockTable
from autopar.planner.pipelines.choose_pipeline import STALE_COPIES, Pipeline
from autopar.planner.pipelines.runs import Runs, find_runs
from autopar.planner.pipelines.stage_search import Cut, StageChoice
from autopar.planner.pipelines.submesh import tables_of
from autopar.planner.problem.build import Built
from autopar.planner.problem.prices import Prices
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import DEVICE, PipelinePlan
from autopar.request import Request
from autopar.schedules.list_scheduler import FAMILIES, OPT_IN_FAMILIES, TIMED_FAMILIES


@dataclass(frozen=True, kw_only=True, eq=False)
class StageProblem:
    """whole: the question on the whole cluster; query: that of one micro-batch on one rank group's devices."""

    whole: Query
    query: Query
    lifetimes: Lifetimes
    runs: Runs

    def recovered(self, plan: Plan) -> Recovered:
        """The layouts of a plan in the problem; recomputation is a choice of stages and not of operators. Raises
        PlanMismatchError for what is no choice."""
        return recover(self.query, without_stages(plan))

    def solved(self, plan: Plan, labels: Rows) -> Solved:
        """Labels of the problem as the solution of a sub-mesh."""
        mesh = plan.layout_mesh
        return Solved(
            built=price(replace(self.query, micro=None), mesh),
            labels=np.asarray(labels, dtype=np.int64),
            mesh=mesh,
            prices=Prices(self.query.cluster, mesh),
            state_bytes=self.query.state_bytes,
            lifetimes=self.lifetimes,
            weights=weight_operators(self.query.program, self.lifetimes),
        )

    def played(self, plan: Plan, solved: Solved, modes: tuple[str, ...]) -> Pipeline:
        """The stages and the schedule of a plan with these layouts. modes: the way of recomputation of every stage.

        Raises ConfigurationError for a cut that is none of the model's, and for a schedule that cannot take it.
        """
        pipeline = plan.staged
        table = self._table(plan, solved)
        both_ways = pipeline.schedule in FAMILIES and FAMILIES[pipeline.schedule].both_ways
        ends = [self.runs.last_operators.index(end) + 1 for end in self._ends(pipeline)]
        begins = [0, *ends[:-1]]
        choices = tuple(
            StageChoice(begin, end, 0, table.modes.index(mode))
            for begin, end, mode in zip(begins, ends, modes, strict=True)
        )
        stages = [table.stage(one.first, one.end, one.mode, twins=both_ways) for one in choices]
        borders = table.borders(ends[:-1], pipeline.built(plan.micro_batches).route(0))
        if pipeline.schedule in TIMED_FAMILIES and not pipeline.actions:
            groups, slowest = plan.mesh.shape[0], max(borders.seconds, default=0.0)
            schedule = schedule_for(pipeline.schedule, stages, groups, plan.micro_batches, slowest)
        else:
            schedule = pipeline.built(plan.micro_batches)
        return Pipeline(
            family=pipeline.schedule,
            chunks=pipeline.chunks,
            micro_batches=plan.micro_batches,
            table=table,
            cut=Cut(stages=choices, objective_seconds=0.0, slowest_seconds=0.0, passes=0, candidates=0),
            costs=play_pipeline(stages, schedule, send_seconds=borders.seconds, near=borders.near),
        )

    def modes(self, plan: Plan, solved: Solved) -> tuple[str, ...]:
        """The way of recomputation of every stage of a plan. Raises PlanMismatchError for one that is none of them."""
        ends = [self.runs.last_operators.index(end) + 1 for end in self._ends(plan.staged)]
        found = []
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            own = [
                node
                for node in self.lifetimes.in_order
                if node.meta["phase"] != "backward" and begin <= self.runs.of(self.lifetimes, node) < end
            ]
            names = {str(n.meta["operator"]) for n in own}
            found.append(self._mode(solved, names, names & plan.recomputed, names & plan.saved_on_host))
        return tuple(found)

    def _mode(self, solved: Solved, own: set[str], again: Set[str], waiting: Set[str]) -> str:
        if not again and not waiting:
            return "none"
        for mode in HOST_MODES if waiting else MODES[1:]:
            expanded = solved.expanded(mode)
            if expanded is None:
                continue
            if _in_state(*expanded, RECOMPUTED) & own == again and _in_state(*expanded, ON_HOST) & own == waiting:
                return mode
        raise PlanMismatchError(
            f"a stage computes {len(again)} operators again, and {len(waiting)} wait on the host, which is no way of a "
            f"stage ({', '.join((*MODES, *HOST_MODES))}): let all operators of a stage follow one of them"
        )

    def _ends(self, pipeline: PipelinePlan) -> list[str]:
        """The last operator of every stage, as an end of a run of blocks."""
        ends = [stage.last_operator or self.runs.last_operators[-1] for stage in pipeline.stages]
        wrong = [end for end in ends if end not in self.runs.last_operators]
        if wrong:
            raise ConfigurationError(
                f"a stage ends at {wrong[0]}, inside of a block; stages are priced block by block, and blocks end at "
                f"{', '.join(self.runs.last_operators)}"
            )
        return ends

    def _table(self, plan: Plan, solved: Solved) -> BlockTable:
        pipeline, asked = plan.staged, self.whole.recompute
        modes = tuple(dict.fromkeys((*(MODES if asked is None else (asked,)), *self.modes(plan, solved))))
        tables = tables_of(self.whole, self.query, solved, self.runs, plan.mesh.shape[0], modes)
        table = tables[0] if pipeline.stages[0].gather_once else tables[-1]
        return table.with_copies(STALE_COPIES) if pipeline.schedule in OPT_IN_FAMILIES else table


def _in_state(built: Built, labels: Labels, state: int) -> set[str]:
    """Names of the operators in a state."""
    return {
        variable.name
        for index, variable in enumerate(built.variables)
        if variable.kind == "operator" and state_of(variable, int(labels[index])) == state
    }


def stage_problem(source: Source, plan: Plan, request: Request | None = None) -> StageProblem:
    """The problem of a plan with equal stages. request: in place of the source's.

    Raises ConfigurationError for stages on unequal groups, and PlanMismatchError where the model does not run in the
    plan's micro-batches.
    """
    asked = request or source.request
    if plan.staged.groups or isinstance(asked.cluster, MixedCluster):
        raise ConfigurationError(
            "stages on unequal rank groups have a problem per group, whose layouts the plan holds for its own stages "
            "only: ask a plan with equal groups, or plan again with what_if(...)"
        )
    whole = query_of(source, replace(plan, pipeline=None, micro_batches=1), asked)
    part = in_parts_of(whole, source.in_parts(plan))
    part = replace(part, cluster=sub_cluster(asked.cluster, plan.mesh.shape[0]), hidden_share=0.0)
    again = {name: plan.operators[name].recompute_at for name in plan.recomputed}
    lifetimes = joined_by(Lifetimes(part.program), again)
    return StageProblem(whole=whole, query=part, lifetimes=lifetimes, runs=find_runs(lifetimes))


def without_stages(plan: Plan) -> Plan:
    """The layouts of a plan with equal stages, as a plan of the sub-mesh that saves everything."""
    operators = {
        name: replace(operator, recompute=False, recompute_at=(), saved_on=DEVICE)
        for name, operator in plan.operators.items()
    }
    return replace(plan, mesh=plan.layout_mesh, pipeline=None, operators=operators, hidden_share=0.0)
