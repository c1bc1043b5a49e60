"""Ways: how a named axis does its work, as asked by `cp=` and `ep=`.

    cp       ring      queries, keys and values stay cut by sequence; blocks of keys and values go around the ranks
             ulysses   all-to-all in front of attention and behind it: the ranks hold whole sequences of some heads
             gather    queries stay cut by sequence; every rank gathers all keys and values
    ep       dispatch  experts are split; every rank sends its rows to the ranks of their experts, and gets them back
             two_level as dispatch, first to every node that has an expert of a token, then inside the node
             gather    rows stay where they are; every rank gathers the weights of all experts
             masked    experts are split; every rank has all rows, and those of other experts are zero
             capacity  as dispatch, but every rank sends as many rows to every expert; those beyond are dropped

Without a word the planner takes what is cheapest: for every attention of its own, for all products of experts together.
What drops rows changes the result: it runs only where it was asked for, with a capacity (`graphs/expert_capacity.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from autopar.errors import ConfigurationError
from autopar.nearest_name import did_you_mean
from autopar.plans.capacity_factor import CAPPED
from autopar.plans.expert_hops import INNER_EXPERT_AXIS
from autopar.request.mesh_axes import EXPERT_AXIS

ContextParallelism: TypeAlias = Literal["ring", "ulysses", "gather"]
CONTEXT_WAYS: tuple[ContextParallelism, ...] = get_args(ContextParallelism)
ExpertParallelism: TypeAlias = Literal["dispatch", "two_level", "gather", "masked", "capacity"]
EXPERT_WAYS: tuple[ExpertParallelism, ...] = get_args(ExpertParallelism)
TWO_LEVEL: ExpertParallelism = "two_level"
TRAVELLING: tuple[ExpertParallelism, ...] = ("dispatch", TWO_LEVEL)
"""In which rows travel, all of them."""
LOSSLESS_WAYS = tuple(way for way in EXPERT_WAYS if way != CAPPED)
"""Of experts, all with the same result."""

_WAYS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "cp": (CONTEXT_WAYS, "attention runs"),
    EXPERT_AXIS: (EXPERT_WAYS, "products of experts run"),
}
"""Axis, and argument -> its ways, and what takes them."""


def split_as(way: ExpertParallelism) -> ExpertParallelism:
    """The lossless way that splits rows and experts alike."""
    return "dispatch" if way in (CAPPED, TWO_LEVEL) else way


def check_ways(dims: Mapping[str, Any] | None, **asked: object) -> None:
    """Raise ConfigurationError for a way that there is not, and for one without an axis to which it belongs. asked: the
    ways by the names of their axes, None where nobody asks."""
    for axis, way in asked.items():
        ways, what = _WAYS[axis]
        if way is None:
            continue
        if way not in ways:
            raise ConfigurationError(f"{axis}={way!r}: write one of {', '.join(ways)}{did_you_mean(way, ways)}")
        if not dims or dims.get(axis, 1) == 1:
            raise ConfigurationError(
                f"{axis}={way!r} says how {what} over an axis {axis}, and there is none: write dims={{{axis!r}: 4}}"
            )
    _check_levels(dims or {}, asked.get(EXPERT_AXIS))


def _check_levels(dims: Mapping[str, Any], way: object) -> None:
    """Two axes of experts are two hops."""
    inner = dims.get(INNER_EXPERT_AXIS, 1)
    if inner == 1:
        return
    if dims.get(EXPERT_AXIS, 1) == 1:
        raise ConfigurationError(
            f"{INNER_EXPERT_AXIS}={inner} is what lies inside of an axis {EXPERT_AXIS}, and there is none: write "
            f"dims={{{EXPERT_AXIS!r}: {inner}}}, or both"
        )
    if way in ("dispatch", CAPPED):
        raise ConfigurationError(
            f"{EXPERT_AXIS}={way!r} sends rows over one axis {EXPERT_AXIS} at once: write one of all its ranks, or "
            f"{EXPERT_AXIS}={TWO_LEVEL!r} for rows that travel over {EXPERT_AXIS} and then over {INNER_EXPERT_AXIS}"
        )
