"""Planning: program + cluster -> Plan. The table of contents of the planner.

For every mesh: enumerate and price (`build`), solve under the memory limit (`solver`), lower for one rank to measure
transient memory, and predict (`one_mesh`). The mesh with the smallest objective wins; the known plans are solved
beside it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster, MixedCluster
from autopar.errors import InfeasibleError
from autopar.parallel_plan import Baseline, ParameterPlan, Plan
from autopar.planner.blocks import blocks_of
from autopar.planner.choose_mesh import Chosen, choose_mesh
from autopar.planner.choose_micro_batches import choose_micro_batches, query_in_parts
from autopar.planner.choose_step import instead, shortest_step
from autopar.planner.constraints import Constraints, Recompute, check_recompute, parse_constraints
from autopar.planner.factorisation import Factorisation
from autopar.planner.from_known import at_least_as_good
from autopar.planner.kept import Kept
from autopar.planner.known_plans import Shapes, baselines, cheapest, known_meshes, solved_known_plans, usable
from autopar.planner.mends import mended
from autopar.planner.mesh_shapes import resolve_meshes
from autopar.planner.micro_batches import AtBatch
from autopar.planner.optimizers import resolve_optimizer, state_bytes
from autopar.planner.query import Progress, Query, budget, kernel_backend
from autopar.planner.read import switching_costs
from autopar.planner.search import Mode, search_of
from autopar.planner.shortage import DoesNotFit
from autopar.planner.solved_meshes import Slower
from autopar.planner.solver.deadline import Deadline, interruptible
from autopar.planner.stages.free import FreePipelines, pipeline_instead
from autopar.planner.stages.mixed import mixed_wish, plan_mixed
from autopar.planner.stages.plan import plan_pipeline
from autopar.planner.stages.wish import Dims, wish_of, without_stages
from autopar.planner.targets import find_wishes, meshes_with_axes, recompute_of
from autopar.program import Program

OPEN_GAP = 1e-2
"""A gap above this asks the known plans for help."""


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
    is_free = mesh is None and not dims and micro_batches != 1 and not parsed.placements and not parsed.pinned
    shapes = _shapes(mesh, parsed, dims is not None or micro_batches not in (None, 1))
    if wish is not None:
        with interruptible(query.deadline):
            return replace(plan_stages(query, wish, micro_batches, at_batch, log), question=answer)
    with interruptible(query.deadline):
        tries_pipelines = is_free and mode != "fast"
        beside = FreePipelines(query, micro_batches, at_batch, began, log) if tries_pipelines else None
        choose = partial(choose_mesh, meshes=meshes, log=log)
        first = choose if beside is None else partial(choose, rival=beside.before_fitting)
        rival = None if beside is None else beside.before_more_parts
        chosen = choose_micro_batches(query, micro_batches, at_batch, first, log, rival)
        if beside is not None and any(isinstance(failure, Slower) for failure in chosen.failures):
            pipeline = beside.instead(chosen) if chosen.best is None else None
            if pipeline is not None:
                beside_it = baselines(query, solved_known_plans(query, None, log)) if with_baselines else ()
                return replace(pipeline, question=answer, baselines=beside_it)
            if chosen.best is None:
                chosen = choose_micro_batches(query, micro_batches, at_batch, choose, log)
        if chosen.best is None:
            named = list(known_meshes(cluster, shapes).values()) if query.search.tries_mends else []
            helper = choose_mesh(query, named, log) if named else Chosen(best=None, failures=())
            chosen = at_least_as_good(query, chosen, helper.best, log)
            if chosen.best is None:
                spent = time.process_time() - began
                pipeline = pipeline_instead(query, micro_batches, at_batch, spent, log) if tries_pipelines else None
                if pipeline is None:
                    raise _why_nothing_fits(query, chosen, helper.failures, log, at_batch, micro_batches)
                note = f"without stages nothing fits: {chosen.failures[0]}"
                return replace(pipeline, question=answer, notes=(*pipeline.notes, note))
        compared = None if with_baselines else shapes if chosen.best.plan.gap > OPEN_GAP else ()
        known = solved_known_plans(query, compared, log)
        chosen = at_least_as_good(query, chosen, cheapest(known, shapes), log)
        plan = _finished(query, chosen, answer, baselines(query, known) if with_baselines else ())
        if beside is not None:
            plan = replace(beside.better_of(plan), question=answer)
        running = query_in_parts(query, chosen.best.plan.micro_batches, at_batch)
        rivals = usable(known, shapes) if running.micro is None else ()
        shorter = shortest_step(running, chosen, rivals, plan.predicted.step_seconds, log)
        return plan if shorter is None else instead(plan, _finished(query, shorter, answer, ()))


def _shapes(mesh: Sequence[int] | None, constraints: Constraints, is_fixed: bool) -> Shapes | None:
    """Shapes of the meshes on which a known plan is one that may be chosen (None: any); is_fixed: by other wishes."""
    if is_fixed or constraints.placements or constraints.pinned:
        return ()
    return None if mesh is None else (tuple(mesh),)


def _why_nothing_fits(
    query: Query,
    chosen: Chosen,
    more: Sequence[Exception],
    log: Progress,
    at_batch: AtBatch | None,
    micro_batches: int | None,
) -> Exception:
    """The failure that needs the least memory, with what would fit; the first one where memory is not what is short."""
    failures = (*chosen.failures, *more)
    short = [failure for failure in failures if isinstance(failure, DoesNotFit)]
    if not short:
        return failures[0]
    error = mended(query, min(short, key=lambda failure: failure.needed_bytes), log, at_batch, micro_batches)
    return InfeasibleError(f"{error}. {'; '.join(chosen.notes)}") if chosen.notes else error


def _finished(query: Query, chosen: Chosen, answer: Mapping[str, Any], known: tuple[Baseline, ...]) -> Plan:
    """The plan of the best candidate, with what is known beside it."""
    best = chosen.best
    assert best is not None
    blocks = blocks_of(query.program, query.factorisation)
    structure = {"blocks": blocks.num_blocks, "kinds_of_blocks": len(blocks.kinds), "cuts": len(blocks.cuts)}
    notes = [*best.plan.notes, *chosen.axis_notes, *chosen.notes]
    if query.deadline.left() <= 0.0:
        why = "Ctrl-C" if query.deadline.stop.pressed else "the time limit"
        notes.append(
            f"{why} ended the search: this is the best plan so far, with a gap of {best.plan.gap:.1e} on its mesh"
        )
    return replace(
        best.plan,
        question=answer,
        notes=tuple(notes),
        statistics={**best.plan.statistics, **structure, **chosen.statistics},
        explanations=switching_costs(best.built, best.solution.assignment),
        alternatives=chosen.alternatives,
        baselines=known,
    )
