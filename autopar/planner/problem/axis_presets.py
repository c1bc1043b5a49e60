"""Axis presets: what the name of an axis asks of operators and parameters.

    dp_replicate   the axis splits the batch; parameters are replicated          (DDP)
    dp_shard       the axis splits the batch; parameters are stored split        (ZeRO-3)
    cp             the axis splits the sequence, attention by queries or by heads; weights are whole in use
                   (context parallelism: a ring of keys and values, Ulysses, or keys and values gathered)
    ep, ep_inner   the axis splits the batch; of products of experts, rows travel to the rank of their expert, or every
                   rank has all experts, or all rows (expert parallelism)
    tp             the axis never splits the batch; weights stay split in use    (Megatron)
    any other name the axis is free

A preset only removes choices. Where it would leave nothing (a batch of 6 over 4, a 0-dim parameter), it lets that
operator go and the plan carries a note. What a user writes for an axis takes its place there.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Mesh, Replicate, Shard
from autopar.planner.problem.strategies import AxisChoice
from autopar.plans.plan_value import ParameterPlan
from autopar.request.axis_ways import ExpertParallelism, split_as
from autopar.request.constraints import Constraints
from autopar.request.mesh_axes import AXIS_NAMES, BATCH_AXES, CONTEXT_AXES, EXPERT_AXES, EXPERT_AXIS


def orders_offered(choices: Sequence[AxisChoice], mesh: Mesh, sequences: int) -> Sequence[AxisChoice]:
    """What a mesh may pick at all. Zigzag order is there for context parallelism: on a mesh with an axis of that name,
    and on one of free axes with more devices than attention has `sequences`, so that some must be cut. Rows of experts
    travel over an axis `ep` alone: a product among others of its layer that do so would cost more than its price."""
    axes = [name for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1]
    named = any(name in CONTEXT_AXES for name in axes)
    free = mesh.size > sequences and not any(name in AXIS_NAMES for name in axes)
    travels = EXPERT_AXIS in axes
    return [c for c in choices if (named or free or not c.zigzag) and (travels or c.beside is None)]


def allowed_choices(
    choices: Sequence[AxisChoice],
    axis_name: str,
    axis_size: int,
    *,
    batch: Hashable,
    sequence: Hashable,
    heavy: bool,
    spread: bool,
    lookups: frozenset[str] = frozenset(),
    heads: frozenset[str] = frozenset(),
    experts: ExpertParallelism | None = None,
) -> list[AxisChoice]:
    """The choices of one operator that an axis of this name may pick, of those that its mesh has (`orders_offered`).

    batch, sequence: the classes of their atoms; heavy: the operator has FLOPs worth splitting; spread: heavy operators
    may not be replicated on any axis; lookups: names along which the operator looks labels up (the vocabulary of a
    loss), which tensor parallelism splits as Megatron does; heads: names along which context parallelism may split
    beside the sequence; experts: how products of experts are to run over an axis of expert parallelism. An axis of one
    device splits nothing.
    """
    if axis_size == 1:
        return list(choices[:1])
    found = [c for c in choices if c.beside is None]
    if axis_name in (*BATCH_AXES, *EXPERT_AXES):
        split = [c for c in choices if c.part is not None and c.atom_class == batch and c.divides(axis_size)]
        ways = _ways_of_experts(choices, split, axis_size) if axis_name in EXPERT_AXES else {}
        asked = None if experts is None else split_as(experts)
        offered = [c for way, own in ways.items() if asked == way or (asked is None and split) for c in own]
        return offered or [c for c in split if c.beside is None] or found
    if axis_name in CONTEXT_AXES:
        apart = [c for c in found if c.name in heads or c.atom_class == sequence]
        split = [c for c in apart if c.part is not None and c.atom_class != batch and c.divides(axis_size)]
        if not split:
            return [c for c in found if c.part is None or c.atom_class != batch]
        # labels that move by a place cost less whole: those may stay
        stays = not any(heavy or not c.other_lengths for c in split)
        return [*(c for c in found if c.part is None), *split] if stays else split
    if axis_name == "tp":
        found = [c for c in found if c.part is None or c.atom_class != batch]
        found = [c for c in found if c.name in lookups and c.divides(axis_size)] or found
    if heavy and (spread or axis_name == "tp"):
        found = [c for c in found if c.part is not None and c.divides(axis_size)] or found
    return found


def _ways_of_experts(
    choices: Sequence[AxisChoice], split: Sequence[AxisChoice], axis_size: int
) -> dict[ExpertParallelism, list[AxisChoice]]:
    """What a product of experts may do over an axis that splits the batch (`split`), by the way in which it does."""
    names = {c.beside[0][0] for c in choices if c.beside is not None}
    return {
        "dispatch": [c for c in split if c.beside is not None and c.pairs(axis_size)],
        "gather": [c for c in split if c.beside is None],
        "masked": [c for c in choices if c.name in names and c.divides(axis_size)],
    }


def allowed_labels(
    labels: Sequence[ParameterPlan],
    name: str,
    mesh: Mesh,
    constraints: Constraints,
    is_matrix: bool,
    freed: Collection[int] = (),
) -> list[int]:
    """Indices of the parameter decisions that pinned layouts and the names of the axes leave. freed: axes that the
    user's own constraints decide for this parameter."""
    if name in constraints.pinned:
        wanted = constraints.pinned[name]
        exact = [i for i, label in enumerate(labels) if (label.stored, label.used) == (wanted.stored, wanted.used)]
        if not exact:
            raise ConfigurationError(f"parameter {name} cannot keep its layout {wanted.stored} on mesh {mesh.shape}")
        return exact
    kept = list(range(len(labels)))
    for axis, (axis_name, size) in enumerate(zip(mesh.axis_names, mesh.shape, strict=True)):
        if axis not in freed:
            asked = axis_name if size > 1 else "dp_replicate"
            kept = _keep(kept, [i for i in kept if _suits(labels[i], axis, asked, is_matrix)])
    return kept


def _keep(current: list[int], wanted: list[int]) -> list[int]:
    return wanted or current


def _suits(label: ParameterPlan, axis: int, axis_name: str, is_matrix: bool) -> bool:
    stored, used = label.stored[axis], label.used[axis]
    if axis_name == "dp_replicate":
        return isinstance(stored, Replicate)
    if axis_name == "dp_shard":
        return isinstance(stored, Shard) and used == stored
    if axis_name in CONTEXT_AXES:
        return used == stored
    if axis_name == "tp":
        return used == stored and (isinstance(stored, Shard) or not is_matrix)
    return True


def weights_stay_split(mesh: Mesh) -> tuple[int, ...]:
    """Axes over which no operator may gather a parameter."""
    return tuple(
        axis
        for axis, (name, size) in enumerate(zip(mesh.axis_names, mesh.shape, strict=True))
        if name == "tp" and size > 1
    )
