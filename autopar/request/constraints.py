"""Constraints: what a user does not leave to the search, read and checked.

    {"layers.*.mlp.*": {"tp": Shard(1)}, "lm_head": Replicate()}      by parameter, module or operator
    {"layers.0": {"recompute": "full"}}
    {"lm_head": {"implementation": "default"}}                        its operators run as they were captured

Which tensors of a program a pattern means, `planner/problem/constraint_targets.py` says. A constraint only removes
choices, takes the place of what the name of an axis asks there (`axis_presets.py`), and never lets go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Placement, Shard, parse_placement
from autopar.nearest_name import did_you_mean
from autopar.plans.plan_entries import IMPLEMENTATIONS
from autopar.plans.plan_value import ParameterPlan
from autopar.request.axis_ways import ContextParallelism, ExpertParallelism

NO_REPLICATED_COMPUTE = "no_replicated_compute"
EVERY_AXIS = "*"
"""The axis of a placement that is written without one."""
_FROM_THE_END = re.compile(r"S\(-(\d+)\)")

RECOMPUTE = "recompute"
"""The key beside the axes that says what backward computes again."""

IMPLEMENTATION = "implementation"
"""The key beside the axes that says by which operator alternative operators run."""

_BESIDE_AXES = (RECOMPUTE, IMPLEMENTATION)

Recompute: TypeAlias = Literal["none", "selective", "full"]
PlacementRules = Mapping[str, Mapping[str, Placement]]  # pattern -> axis name or EVERY_AXIS -> placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the search may not choose. `placements`: pattern -> axis -> placement;
    `recompute`: pattern of modules or operators -> what backward computes again; `implementations`: pattern of modules
    or operators -> the operator alternative by which those that have it run; `pinned`: whole decisions for parameters;
    `cp`, `ep`: how attention and products of experts run over axes of these names; `without_rings`: attention is no
    ring; `no_replicated_compute`: heavy operators may not be replicated on any axis."""

    placements: PlacementRules = field(default_factory=dict)
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    implementations: Mapping[str, str] = field(default_factory=dict)
    pinned: Mapping[str, ParameterPlan] = field(default_factory=dict)
    cp: ContextParallelism | None = None
    without_rings: bool = False
    ep: ExpertParallelism | None = None
    no_replicated_compute: bool = False


def parse_constraints(constraints: object, pinned: Mapping[str, ParameterPlan] | None = None) -> Constraints:
    """The `constraints=` argument: None, "no_replicated_compute", or a dictionary.

    {pattern: {axis: placement, "recompute": "full", "implementation": "default"}, pattern: placement (on every axis),
    "no_replicated_compute": True}; a placement is an object or its text, and S(-1) is the last dim. Raises
    ConfigurationError naming what cannot be meant.
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
    implementations = {
        pattern: _implementation(value[IMPLEMENTATION], pattern)
        for pattern, value in given.items()
        if isinstance(value, Mapping) and IMPLEMENTATION in value
    }
    rules = {pattern: _by_axis(pattern, value) for pattern, value in given.items()}
    spread = bool(constraints.get(NO_REPLICATED_COMPUTE, False))
    return Constraints(
        placements={pattern: by_axis for pattern, by_axis in rules.items() if by_axis},
        recompute=recompute,
        implementations=implementations,
        no_replicated_compute=spread,
        pinned=pinned or {},
    )


def check_recompute(value: object, where: str) -> Recompute:
    """ "none", "selective" or "full". Raises ConfigurationError naming `where` it stands."""
    known: tuple[Recompute, ...] = get_args(Recompute)
    for choice in known:
        if value == choice:
            return choice
    near = did_you_mean(value, known)
    raise ConfigurationError(f"{where}: recompute={value!r}; write one of {', '.join(known)}{near}")


def _implementation(value: object, pattern: str) -> str:
    if value in IMPLEMENTATIONS:
        return str(value)
    near = did_you_mean(value, IMPLEMENTATIONS)
    raise ConfigurationError(
        f"constraint {pattern!r}: implementation={value!r}; write one of {', '.join(IMPLEMENTATIONS)}{near}"
    )


def _pattern(pattern: object) -> str:
    if not isinstance(pattern, str):
        raise ConfigurationError(f"constraint {pattern!r}: a pattern is a text, such as 'layers.*.weight'")
    return pattern


def _by_axis(pattern: str, value: object) -> dict[str, Placement]:
    if not isinstance(value, Mapping):
        return {EVERY_AXIS: _placement(pattern, value)}
    if not value:
        raise ConfigurationError(f"constraint {pattern!r} is empty; write an axis and a placement: {{'tp': 'S(0)'}}")
    return {str(axis): _placement(pattern, placement) for axis, placement in value.items() if axis not in _BESIDE_AXES}


def _placement(pattern: str, value: object) -> Placement:
    """A placement, as an object (also torch's own) or as text."""
    if isinstance(value, Shard):
        return value
    match = _FROM_THE_END.fullmatch(str(value).strip())
    try:
        return Shard(-int(match[1])) if match else parse_placement(str(value))
    except ConfigurationError as error:
        raise ConfigurationError(f"constraint {pattern!r}: {error}") from error
