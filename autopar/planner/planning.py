"""Planning: program + request -> Plan. What is asked, read into a `Query`, and who answers.

For every mesh: enumerate and price (`build`), solve under the memory limit (`solver`), lower for one rank to measure
transient memory, and predict (`one_mesh`). How the best of all is found: `best_plan`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from autopar.cluster import MixedCluster
from autopar.parallel_plan import Plan
from autopar.planner.best_plan import Asked, best_plan
from autopar.planner.kept import Kept
from autopar.planner.mesh_shapes import resolve_meshes
from autopar.planner.micro_batches import Recapture
from autopar.planner.optimizers import resolve_optimizer
from autopar.planner.query import Query
from autopar.planner.solver.deadline import interruptible
from autopar.planner.stages.mixed import plan_mixed
from autopar.planner.stages.plan import plan_pipeline
from autopar.planner.stages.wish import PipelineWish, wish_of, without_stages
from autopar.planner.targets import meshes_with_axes, recompute_of
from autopar.program import Program
from autopar.request import Request


def make_plan(
    program: Program, request: Request, *, recapture: Recapture | None = None, kept: Kept | None = None
) -> Plan:
    """The best plan for a captured program, as a request asks.

    recapture: gives the program at another size of its batch, for more than one micro-batch and for stages. kept:
    results of earlier questions about this program.
    The first Ctrl-C ends the search: the best plan so far is returned with its bound, and notes say so.
    Raises ConfigurationError for what the program cannot have and InfeasibleError when nothing fits.
    """
    began = time.process_time()
    query = Query.of(program, request, recapture=recapture, kept=kept)
    recompute_of(program, query.constraints)
    question = _question(request, query)
    wish = wish_of(request.cluster, request.mesh, request.dims, request.schedule)
    with interruptible(query.deadline):
        plan = _over_meshes(request, query, began) if wish is None else _with_stages(request, query, wish)
    return replace(plan, question=question)


def _over_meshes(request: Request, query: Query, began: float) -> Plan:
    """The best plan, where no stages are asked for."""
    meshes = resolve_meshes(request.cluster, request.mesh, without_stages(request.dims))
    meshes = meshes_with_axes(query.constraints.placements, meshes)
    return best_plan(Asked.of(request, query, meshes, began))


def _with_stages(request: Request, query: Query, wish: PipelineWish) -> Plan:
    """The best pipeline, where one is asked for."""
    if isinstance(request.cluster, MixedCluster):
        return plan_mixed(query, wish, request.memory_limit)
    return plan_pipeline(query, wish)


def _question(request: Request, query: Query) -> dict[str, Any]:
    """What the plan answers: what was asked, and how the planner understood it."""
    kind, _ = resolve_optimizer(request.optimizer)
    return {
        **request.as_question(query.program),
        "optimizer": kind if isinstance(kind, str) else kind.__name__,
        "optimizer_assumed": request.optimizer is None,
        "mode": request.mode,
        "time_limit_seconds": request.time_limit,
        "recompute": request.recompute,
        "memory_limit_bytes": query.budget_bytes,
        "cluster": request.cluster.name,
    }
