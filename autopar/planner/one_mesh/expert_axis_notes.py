"""Notes of expert parallelism: what an axis ep was meant to do with products of experts and cannot, and what runs.

ep=4: the program has no products of experts (autopar.expert_linear): the axis splits the ...
6 experts do not divide by ep=4 and are fewer than 16: rows do not travel; every rank keeps its rows and gathers ...
the batch of 6 does not divide by ep=4: rows do not travel; every rank has all rows, and those of other experts are zero
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from autopar.graphs.operator_names import base_name
from autopar.layouts.placement import Mesh
from autopar.planner.one_mesh.context_notes import Assignment, picked_names
from autopar.planner.problem.build import Built
from autopar.planner.problem.factorisation import Factorisation, batch_class
from autopar.planner.problem.strategies import MINIMUM_UNEVEN_BLOCKS, divides
from autopar.plans.parallelism import EXPERT_SPLITS
from autopar.plans.plan_text import format_mesh
from autopar.program import Program
from autopar.request.axis_ways import TWO_LEVEL, ExpertParallelism, split_as
from autopar.request.mesh_axes import EXPERT_AXES

_MEANT = {
    "dispatch": "rows do not travel", TWO_LEVEL: "rows do not travel in two hops", "gather": "rows are not split",
    "masked": "experts are not split", "capacity": "rows do not travel, and none is dropped",
}  # fmt: skip
_INSTEAD = {
    "t": "every rank keeps its rows and gathers the weights of all experts",
    "e": "every rank has all rows, and those of other experts are zero",
}
"""What products of experts split over an axis, in words."""


def expert_axis_notes(
    program: Program,
    built: Built,
    factorisation: Factorisation,
    assignment: Assignment,
    mesh: Mesh,
    ep: ExpertParallelism | None,
) -> Iterator[str]:
    """Each once; none where a mesh has no axis of expert parallelism. ep: the way that is planned."""
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    axes = [axis for axis, name in enumerate(mesh.axis_names) if name in EXPERT_AXES and mesh.shape[axis] > 1]
    if not axes:
        return
    said = format_mesh({name: size for name, size in sizes.items() if name in EXPERT_AXES})
    products = [node for node in built.rules if base_name(node.target) == "expert_linear"]
    if not products:
        yield (
            f"{said}: the program has no products of experts (autopar.expert_linear): the axis splits "
            "the batch, as data parallelism does"
        )
    found: dict[str, None] = {}
    for node in products:
        names = picked_names(built, assignment, node)
        others = [names[axis] for axis in axes if ep and EXPERT_SPLITS.get(names[axis] or "") != split_as(ep)]
        if ep is not None and others:
            experts, samples = built.rules[node].sizes["e"], _samples(program, factorisation, node)
            why = _why(experts, samples, math.prod(mesh.shape[axis] for axis in axes), said, ep)
            found[f"{why}: {_MEANT[ep]}; {_INSTEAD.get(others[0] or '', 'products of experts run whole')}"] = None
    yield from found


def _why(experts: int, samples: int, size: int, axis: str, ep: ExpertParallelism) -> str:
    """Why products of experts do not run in a way over so many ranks."""
    if ep != "masked" and samples % size:
        return f"the batch of {samples} does not divide by {axis}"
    if ep == TWO_LEVEL and experts % size:
        return f"{experts} experts do not divide by {axis}"
    if ep != "gather" and not divides(experts, size, may_be_uneven=True):
        return f"{experts} experts do not divide by {axis} and are fewer than {MINIMUM_UNEVEN_BLOCKS * size}"
    return f"rows, experts and what is asked of them leave no {ep} over {axis}"


def _samples(program: Program, factorisation: Factorisation, node: fx.Node) -> int:
    """Of how many samples the rows of a product are; one where rows are no samples."""
    batch, rows = batch_class(program, factorisation), factorisation.rules[node].sizes["t"]
    atoms = factorisation.name_atoms(node, "t", rows)
    return next((a for i, a in enumerate(atoms) if factorisation.name_atom_class(node, "t", i) == batch), 1)
