"""Planning: program + request -> Plan. What is asked, read into a `Query`, and who answers.

For every mesh: enumerate and price (`build`), solve under the memory limit (`solver`), lower for one rank to measure
transient memory, and predict (`one_mesh`). How the best of all is found: `best_plan`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from autopar.hardware.cluster import MixedCluster
from autopar.planner.batch.micro_batch_program import Recapture
from autopar.planner.meshes.mesh_shapes import resolve_meshes
from autopar.planner.one_mesh.query import Query
from autopar.planner.pipelines.mixed_devices import plan_mixed
from autopar.planner.pipelines.plan_pipeline import plan_pipeline
from autopar.planner.problem.constraint_targets import implementations_of, meshes_with_axes, recompute_of
from autopar.planner.problem.optimizer_states import resolve_optimizer
from autopar.planner.problem.program_cache import ProgramCache
from autopar.planner.search.best_plan import Asked, best_plan
from autopar.planner.search.context_ways import planned_the_other_ways_too
from autopar.planner.search.expert_ways import planned_in_every_expert_way
from autopar.planner.search.kernels_for_memory import planned_for_memory_too
from autopar.planner.solver.deadline import interruptible
from autopar.plans.logical_shards import num_shards
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.request import Request
from autopar.request.pipeline_request import PipelineRequest, pipeline_request, without_stages


def make_plan(
    program: Program, request: Request, *, recapture: Recapture | None = None, kept: ProgramCache | None = None
) -> Plan:
    """The best plan for a captured program, as a request asks.

    recapture: gives the program at another size of its batch, for more than one micro-batch and for stages. kept:
    results of earlier questions about this program.
    The first Ctrl-C ends the search: the best plan so far is returned with its bound, and notes say so.
    Raises ConfigurationError for what the program cannot have and InfeasibleError when nothing fits.
    """
    began = time.process_time()
    query = Query.of(program, request, recapture=recapture, kept=kept)
    search = partial(planned_in_every_expert_way, partial(_planned_in_ways, began), request)
    recompute_of(query.program, query.constraints)
    implementations_of(query.program, query.constraints)
    with interruptible(query.deadline):
        plan = planned_for_memory_too(program, request, query, search)
    return replace(plan, question=_question(request, query))


def _planned_in_ways(began: float, request: Request, query: Query) -> Plan:
    """The best plan, over the ways of attention, too."""
    return planned_the_other_ways_too(partial(_planned, request, began), query)


def _planned(request: Request, began: float, query: Query) -> Plan:
    stages_asked = pipeline_request(request.cluster, request.mesh, request.dims, request.schedule)
    if stages_asked is None:
        return _over_meshes(request, query, began)
    return _with_stages(request, query, stages_asked)


def _over_meshes(request: Request, query: Query, began: float) -> Plan:
    """The best plan, where no stages are asked for."""
    sizes = request.mesh
    if num_shards(request.deterministic) and sizes is None and request.dims is None:
        sizes = (request.cluster.num_devices,)  # all sums go over one axis
    meshes = resolve_meshes(request.cluster, sizes, without_stages(request.dims))
    meshes = meshes_with_axes(query.constraints.placements, meshes)
    return best_plan(Asked.of(request, query, meshes, began))


def _with_stages(request: Request, query: Query, stages_asked: PipelineRequest) -> Plan:
    """The best pipeline, where one is asked for."""
    if isinstance(request.cluster, MixedCluster):
        return plan_mixed(query, stages_asked, request.memory_limit)
    return plan_pipeline(query, stages_asked)


def _question(request: Request, query: Query) -> dict[str, Any]:
    """What the plan answers: what was asked, and how the planner understood it."""
    kind, _ = resolve_optimizer(request.optimizer)
    return {
        **request.as_question(query.program),
        **({"expert_load": dict(query.expert_load)} if query.expert_load else {}),
        "optimizer": kind if isinstance(kind, str) else kind.__name__,
        "optimizer_assumed": request.optimizer is None,
        "mode": request.mode,
        "time_limit_seconds": request.time_limit,
        "recompute": request.recompute,
        "memory_limit_bytes": query.budget_bytes,
        "cluster": request.cluster.name,
    }
