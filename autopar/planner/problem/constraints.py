"""Constraints: named axes are presets of them, and users add their own.

    dp_replicate   the axis splits the batch; parameters are replicated          (DDP)
    dp_shard       the axis splits the batch; parameters are stored split        (ZeRO-3)
    tp             the axis never splits the batch; weights stay split in use    (Megatron)
    any other name the axis is free

    {"layers.*.mlp.*": {"tp": Shard(1)}, "lm_head": Replicate()}      by parameter, module or operator
    (`constraint_targets`)

A constraint only removes choices. Where a preset would leave nothing (a batch of 6 over 4, a 0-dim parameter), it lets
that operator go and the plan carries a note. What a user writes for an axis takes the place of the preset there, and
never lets go.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Mesh, Placement, Replicate, Shard, parse_placement
from autopar.planner.problem.strategies import AxisChoice, divides
from autopar.plans.plan_value import ParameterPlan

BATCH_AXES = ("dp_replicate", "dp_shard")
NO_REPLICATED_COMPUTE = "no_replicated_compute"
EVERY_AXIS = "*"
"""The axis of a placement that is written without one."""
_FROM_THE_END = re.compile(r"S\(-(\d+)\)")

RECOMPUTE = "recompute"
"""The key beside the axes that says what backward computes again."""

Recompute: TypeAlias = Literal["none", "selective", "full"]
PlacementRules = Mapping[str, Mapping[str, Placement]]  # pattern -> axis name or EVERY_AXIS -> placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the search may not choose. `placements`: pattern -> axis -> placement, see `constraint_targets`;
    `recompute`: pattern of modules or operators -> what backward computes again; `pinned`: whole
    decisions for parameters; `no_replicated_compute`: heavy operators may not be replicated on any axis."""

    placements: PlacementRules = field(default_factory=dict)
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    pinned: Mapping[str, ParameterPlan] = field(default_factory=dict)
    no_replicated_compute: bool = False


def parse_constraints(constraints: object, pinned: Mapping[str, ParameterPlan] | None = None) -> Constraints:
    """The `constraints=` argument: None, "no_replicated_compute", or a dictionary.

    {pattern: {axis: placement, "recompute": "full"}, pattern: placement (on every axis), "no_replicated_compute":
    True}; a placement is an object or its text, and S(-1) is the last dim. Raises ConfigurationError naming what
    cannot be meant.
    """
    if constraints is None:
        return Constraints(pinned=pinned or {})
    if isinstance(constraints, str) and constraints == NO_REPLICATED_COMPUTE:
        return Constraints(no_replicated_compute=True, pinned=pinned or {})
    if not isinstance(constraints, Mapping):
        raise ConfigurationError(
            f"constraints={constraints!r}: write {NO_REPLICATED_COMPUTE!r} or {{'layers.*.weight': {{'tp': 'S(0)'}}}}"
        )
    given = {_pattern(key): value for key, value in constraints.items() if key != NO_REPLICATED_COMPUTE}
    recompute = {
        pattern: check_recompute(value[RECOMPUTE], f"constraint {pattern!r}")
        for pattern, value in given.items()
        if isinstance(value, Mapping) and RECOMPUTE in value
    }
    rules = {pattern: _by_axis(pattern, value) for pattern, value in given.items()}
    spread = bool(constraints.get(NO_REPLICATED_COMPUTE, False))
    return Constraints(
        placements={pattern: by_axis for pattern, by_axis in rules.items() if by_axis},
        recompute=recompute,
        no_replicated_compute=spread,
        pinned=pinned or {},
    )


def check_recompute(value: object, where: str) -> Recompute:
    """ "none", "selective" or "full". Raises ConfigurationError naming `where` it stands."""
    known: tuple[Recompute, ...] = get_args(Recompute)
    for choice in known:
        if value == choice:
            return choice
    raise ConfigurationError(f"{where}: recompute={value!r}; write one of {', '.join(known)}")


def _pattern(pattern: object) -> str:
    if not isinstance(pattern, str):
        raise ConfigurationError(f"constraint {pattern!r}: a pattern is a text, such as 'layers.*.weight'")
    return pattern


def _by_axis(pattern: str, value: object) -> dict[str, Placement]:
    if not isinstance(value, Mapping):
        return {EVERY_AXIS: _placement(pattern, value)}
    if not value:
        raise ConfigurationError(f"constraint {pattern!r} is empty; write an axis and a placement: {{'tp': 'S(0)'}}")
    return {str(axis): _placement(pattern, placement) for axis, placement in value.items() if axis != RECOMPUTE}


def _placement(pattern: str, value: object) -> Placement:
    """A placement, as an object (also torch's own) or as text."""
    if isinstance(value, Shard):
        return value
    match = _FROM_THE_END.fullmatch(str(value).strip())
    try:
        return Shard(-int(match[1])) if match else parse_placement(str(value))
    except ConfigurationError as error:
        raise ConfigurationError(f"constraint {pattern!r}: {error}") from error


def allowed_choices(
    choices: Sequence[AxisChoice],
    axis_name: str,
    axis_size: int,
    *,
    batch: Hashable,
    heavy: bool,
    spread: bool,
    lookups: frozenset[str] = frozenset(),
) -> list[AxisChoice]:
    """The choices of one operator that an axis of this name may pick.

    batch: the class of the batch atom; heavy: the operator has FLOPs worth splitting; spread: heavy operators may
    not be replicated on any axis; lookups: names along which the operator looks labels up (the vocabulary of a loss),
    which tensor parallelism splits as Megatron does. An axis of one device splits nothing.
    """
    if axis_size == 1:
        return list(choices[:1])
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


def _divides(choice: AxisChoice, axis_size: int) -> bool:
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
    return tuple(
        axis
        for axis, (name, size) in enumerate(zip(mesh.axis_names, mesh.shape, strict=True))
        if name == "tp" and size > 1
    )
