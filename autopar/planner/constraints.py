"""Constraints: named axes are presets of them, and users add their own.

    dp_replicate   the axis splits the batch; parameters are replicated          (DDP)
    dp_shard       the axis splits the batch; parameters are stored split        (ZeRO-3)
    tp             the axis never splits the batch; weights stay split in use    (Megatron)
    any other name the axis is free

A constraint only removes choices. Where nothing would be left (a batch of 6 over 4, a 0-dim parameter), it lets that
operator go and the plan carries a note.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import ConfigurationError
from autopar.layout import Layout, Mesh, Placement, Replicate, Shard, parse_placement
from autopar.parallel_plan import ParameterPlan
from autopar.planner.strategies import Choice, divides

BATCH_AXES = ("dp_replicate", "dp_shard")
NO_REPLICATED_COMPUTE = "no_replicated_compute"

PlacementRules = Mapping[str, Mapping[str, Placement]]  # parameter pattern -> axis name -> placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the search may not choose. `placements`: parameter pattern -> axis -> stored placement; `pinned`: whole
    decisions for parameters; `no_replicated_compute`: heavy operators may not be replicated on any axis."""

    placements: PlacementRules = field(default_factory=dict)
    pinned: Mapping[str, ParameterPlan] = field(default_factory=dict)
    no_replicated_compute: bool = False


def parse_constraints(constraints: object, pinned: Mapping[str, ParameterPlan] | None = None) -> Constraints:
    """The `constraints=` argument: None, "no_replicated_compute", or {pattern: {axis: placement or its text}}.

    A dict may also carry the key "no_replicated_compute": True. Raises ConfigurationError naming what is unknown.
    """
    if constraints is None:
        return Constraints(pinned=pinned or {})
    if constraints == NO_REPLICATED_COMPUTE:
        return Constraints(no_replicated_compute=True, pinned=pinned or {})
    if not isinstance(constraints, Mapping):
        raise ConfigurationError(
            f"constraints={constraints!r}: write {NO_REPLICATED_COMPUTE!r} or {{'layers.*.weight': {{'tp': 'S(0)'}}}}"
        )
    rules: dict[str, dict[str, Placement]] = {}
    for pattern, by_axis in constraints.items():
        if pattern == NO_REPLICATED_COMPUTE:
            continue
        if not isinstance(by_axis, Mapping):
            raise ConfigurationError(f"constraint {pattern!r} must map axis names to placements, not {by_axis!r}")
        rules[pattern] = {axis: parse_placement(str(p)) for axis, p in by_axis.items()}
    spread = bool(constraints.get(NO_REPLICATED_COMPUTE, False))
    return Constraints(placements=rules, no_replicated_compute=spread, pinned=pinned or {})


def check_axes(constraints: Constraints, mesh: Mesh, parameters: Sequence[str]) -> None:
    """Raises ConfigurationError for a constraint on an axis that the mesh lacks or a pattern that matches nothing."""
    for pattern, by_axis in constraints.placements.items():
        for axis in by_axis:
            if axis not in mesh.axis_names:
                raise ConfigurationError(
                    f"constraint {pattern!r} names axis {axis!r}; the mesh has {', '.join(mesh.axis_names)}"
                )
        if not fnmatch.filter(parameters, pattern):
            raise ConfigurationError(f"constraint {pattern!r} matches no parameter, for example {parameters[:3]}")


def allowed_choices(
    choices: Sequence[Choice],
    axis_name: str,
    axis_size: int,
    *,
    batch: Hashable,
    heavy: bool,
    spread: bool,
    lookups: frozenset[str] = frozenset(),
) -> list[Choice]:
    """The choices of one operator that an axis of this name may pick.

    batch: the class of the batch atom; heavy: the operator has FLOPs worth splitting; spread: heavy operators may
    not be replicated on any axis; lookups: names along which the operator looks labels up (the vocabulary of a loss),
    which tensor parallelism splits as Megatron does.
    """
    if axis_name in BATCH_AXES:
        split = [c for c in choices if c.part is not None and c.atom_class == batch and _divides(c, axis_size)]
        return split or list(choices)
    found = list(choices)
    if axis_name == "tp":
        found = [c for c in found if c.part is None or c.atom_class != batch]
        found = [c for c in found if c.name in lookups and _divides(c, axis_size)] or found
    if heavy and (spread or axis_name == "tp"):
        found = [c for c in found if c.part is not None and _divides(c, axis_size)] or found
    return found


def allowed_labels(
    labels: Sequence[ParameterPlan], name: str, mesh: Mesh, constraints: Constraints, is_matrix: bool
) -> list[int]:
    """Indices of the parameter decisions that the axes and the user's constraints leave."""
    if name in constraints.pinned:
        wanted = constraints.pinned[name]
        exact = [i for i, label in enumerate(labels) if (label.stored, label.used) == (wanted.stored, wanted.used)]
        if not exact:
            raise ConfigurationError(f"parameter {name} cannot keep its layout {wanted.stored} on mesh {mesh.shape}")
        return exact
    kept = list(range(len(labels)))
    for axis, axis_name in enumerate(mesh.axis_names):
        kept = _keep(kept, [i for i in kept if _suits(labels[i], axis, axis_name, is_matrix)])
    for pattern, by_axis in constraints.placements.items():
        if fnmatch.fnmatch(name, pattern):
            for axis_name, placement in by_axis.items():
                axis = mesh.axis_names.index(axis_name)
                wanted_labels = [i for i in kept if labels[i].stored[axis] == placement]
                if not wanted_labels:
                    raise ConfigurationError(
                        f"constraint {pattern!r}: {name} cannot be stored {placement} on {axis_name}={mesh.shape[axis]}"
                    )
                kept = wanted_labels
    return kept


def _divides(choice: Choice, axis_size: int) -> bool:
    return divides(choice.atom, axis_size, choice.may_be_uneven)


def _keep(current: list[int], wanted: list[int]) -> list[int]:
    return wanted or current


def _suits(label: ParameterPlan, axis: int, axis_name: str, is_matrix: bool) -> bool:
    stored, used = label.stored[axis], label.used[axis]
    if axis_name == "dp_replicate":
        return isinstance(stored, Replicate)
    if axis_name == "dp_shard":
        return isinstance(stored, Shard) and used == stored
    if axis_name == "tp":
        return used == stored and (isinstance(stored, Shard) or not is_matrix)
    return True


def weights_stay_split(mesh: Mesh) -> tuple[int, ...]:
    """Axes over which no operator may gather a parameter."""
    return tuple(axis for axis, name in enumerate(mesh.axis_names) if name == "tp")


def gathers(source: Layout, target: Layout, axes: Sequence[int]) -> bool:
    """Whether a parameter in `source` would be gathered over one of `axes` to reach `target`."""
    return any(isinstance(source[axis], Shard) and source[axis] != target[axis] for axis in axes)
