"""From baselines: where a baseline beats the search, the search begins again from it.

    the free search under a tight limit found nothing;  ZeRO-3 fits, 410 ms   ->  searched from ZeRO-3: 395 ms
    time ended the free search at 400 ms, gap 8 %;      ZeRO-3 costs 390 ms   ->  searched from ZeRO-3: 385 ms

Every baseline is one of the free space. The axes of its mesh are named, which leaves a smaller space, in which a
limited search finds what it misses in the whole.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.planner.meshes.baseline_plans import as_baseline
from autopar.planner.meshes.choose_mesh import Chosen, choose_mesh
from autopar.planner.meshes.mesh_shapes import resolve_meshes
from autopar.planner.one_mesh.mesh_plan import Candidate
from autopar.planner.one_mesh.query import Query


def at_least_as_good(query: Query, chosen: Chosen, start: Candidate | None) -> Chosen:
    """The choice, or what is found from a baseline where that costs less. Where nothing was chosen and nothing is
    found, the baseline itself. start: a baseline on a mesh that may be chosen; None leaves the choice as it is."""
    if start is None or start.plan.objective_seconds >= _objective(chosen.best):
        return chosen
    meshes = resolve_meshes(query.cluster, start.mesh.shape, None)
    found = choose_mesh(replace(query, warm_start=start.plan), meshes)
    if chosen.best is None:
        axes = "+".join(start.mesh.axis_names)
        note = f"the free search found nothing that fits: this is the optimum of the plans with the axes {axes}"
        return found if found.best is not None else replace(chosen, best=start, notes=(*chosen.notes, note))
    if _objective(found.best) >= _objective(chosen.best):
        return chosen
    others = [other for other in chosen.alternatives if tuple(other.dims.values()) != start.mesh.shape]
    beaten = [] if chosen.best.mesh.shape == start.mesh.shape else [as_baseline(chosen.best.plan)]
    return replace(
        chosen, best=found.best, alternatives=(*beaten, *others), axis_notes=found.axis_notes, notes=found.notes
    )


def _objective(candidate: Candidate | None) -> float:
    return math.inf if candidate is None else candidate.plan.objective_seconds
