"""Planning: program + cluster -> Plan. What a user asks, read into a `Query`, and who answers.

For every mesh: enumerate and price (`build`), solve under the memory limit (`solver`), lower for one rank to measure
transient memory, and predict (`one_mesh`). How the best of all is found: `best_plan`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster, MixedCluster
from autopar.parallel_plan import Plan
from autopar.plan_value import ParameterPlan
from autopar.planner.best_plan import Asked, best_plan, shapes_of
from autopar.planner.constraints import Recompute, check_recompute, parse_constraints
from autopar.planner.factorisation import Factorisation
from autopar.planner.kept import Kept
from autopar.planner.mesh_shapes import resolve_meshes
from autopar.planner.micro_batches import AtBatch
from autopar.planner.optimizers import resolve_optimizer, state_bytes
from autopar.planner.query import Progress, Query, budget, kernel_backend
from autopar.planner.search import Mode, search_of
from autopar.planner.solver.deadline import Deadline, interruptible
from autopar.planner.stages.mixed import mixed_wish, plan_mixed
from autopar.planner.stages.plan import plan_pipeline
from autopar.planner.stages.wish import Dims, wish_of, without_stages
from autopar.planner.targets import find_wishes, meshes_with_axes, recompute_of
from autopar.program import Program


def make_plan(
    program: Program,
    cluster: Cluster,
    *,
    mesh: Sequence[int] | None = None,
    dims: Dims | None = None,
    optimizer: Any = None,
    memory_limit: float | str | None = None,
    constraints: object = None,
    parameter_layouts: Mapping[str, ParameterPlan] | None = None,
    question: Mapping[str, Any] | None = None,
    with_baselines: bool = True,
    mode: Mode = "default",
    time_limit: float | None = None,
    warm_start: Plan | str | Path | None = None,
    recompute: Recompute | None = None,
    kept: Kept | None = None,
    micro_batches: int | None = None,
    at_batch: AtBatch | None = None,
    schedule: str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The best plan for a captured program on a cluster.

    mesh: sizes only; dims: named axes (-1 fills), "pp" among them for stages (a number of equal groups, or the devices
    of every stage); schedule: their family. memory_limit:
    bytes per device, "72GiB", or a fraction of the device; default: the device less context and fragmentation.
    parameter_layouts: decisions to keep. mode: how long the solver may search (`planner.search`); time_limit: seconds
    for everything. warm_start: a plan to begin with, or its file. recompute: "none", "selective" or "full" everywhere
    (None: as memory asks). kept: results of earlier questions about this program. micro_batches: in how many parts of
    the batch a step runs (None: as memory asks); at_batch: captures the program at another size of the batch, for more
    than one.
    The first Ctrl-C ends the search: the best plan so far is returned with its bound, and notes say so.
    Raises ConfigurationError for impossible arguments and InfeasibleError when nothing fits.
    """
    began = time.process_time()
    log = progress or (lambda message: None)
    parsed = parse_constraints(constraints, parameter_layouts)
    mixed = cluster if isinstance(cluster, MixedCluster) else None
    wish = mixed_wish(mixed, mesh, dims, schedule) if mixed else wish_of(dims, schedule, cluster.num_devices)
    plan_stages = partial(plan_mixed, memory_limit=memory_limit) if mixed else plan_pipeline
    meshes = resolve_meshes(cluster, mesh, without_stages(dims)) if wish is None else []
    kept = kept or Kept()
    factorisation = kept.factorisations.recall(program, lambda: Factorisation(program))
    wishes = find_wishes(program, parsed, factorisation)
    meshes = meshes_with_axes(parsed.placements, meshes) if wish is None else []
    query = Query(
        program=program,
        cluster=cluster,
        state_bytes=state_bytes(program, optimizer, cluster.device.kind),
        constraints=parsed,
        wishes=wishes,
        budget_bytes=budget(memory_limit, cluster),
        kernel_backend=kernel_backend(cluster),
        factorisation=factorisation,
        search=search_of(mode, time_limit),
        deadline=Deadline.after(time_limit),
        warm_start=Plan.load(warm_start) if isinstance(warm_start, str | Path) else warm_start,
        recompute=None if recompute is None else check_recompute(recompute, "the plan"),
        kept=kept,
    )
    recompute_of(program, parsed)
    kind, _ = resolve_optimizer(optimizer)
    answer = {
        **(question or {}),
        "optimizer": kind if isinstance(kind, str) else kind.__name__,
        "optimizer_assumed": optimizer is None,
        "mode": mode,
        "time_limit_seconds": time_limit,
        "recompute": recompute,
        "memory_limit_bytes": query.budget_bytes,
        "cluster": cluster.name,
    }
    if wish is not None:
        with interruptible(query.deadline):
            return replace(plan_stages(query, wish, micro_batches, at_batch, log), question=answer)
    is_free = mesh is None and not dims and micro_batches != 1 and not parsed.placements and not parsed.pinned
    asked = Asked(
        query=query,
        meshes=meshes,
        shapes=shapes_of(mesh, parsed, dims is not None or micro_batches not in (None, 1)),
        micro_batches=micro_batches,
        at_batch=at_batch,
        with_baselines=with_baselines,
        tries_pipelines=is_free and mode != "fast",
        began=began,
        log=log,
    )
    with interruptible(query.deadline):
        return replace(best_plan(asked), question=answer)
