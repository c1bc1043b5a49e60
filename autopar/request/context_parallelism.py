"""How attention runs over an axis `cp`, as asked: cp="ring" | "ulysses" | "gather".

    ring      queries, keys and values stay cut by sequence; blocks of keys and values go around the ranks
    ulysses   all-to-all in front of attention and behind it: the ranks hold whole sequences of some heads
    gather    queries stay cut by sequence; every rank gathers all keys and values

Without a word the planner takes what is cheapest, for every attention of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from autopar.errors import ConfigurationError
from autopar.nearest_name import did_you_mean

ContextParallelism: TypeAlias = Literal["ring", "ulysses", "gather"]
WAYS: tuple[ContextParallelism, ...] = get_args(ContextParallelism)


def check_context_parallelism(cp: object, dims: Mapping[str, Any] | None) -> None:
    """Raise ConfigurationError for a way that there is not, and for one without an axis to which it belongs."""
    if cp is None:
        return
    if cp not in WAYS:
        raise ConfigurationError(f"cp={cp!r}: write one of {', '.join(WAYS)}{did_you_mean(cp, WAYS)}")
    if not dims or dims.get("cp", 1) == 1:
        raise ConfigurationError(
            f"cp={cp!r} says how attention runs over an axis cp, and there is none: write dims={{'cp': 4}}"
        )
