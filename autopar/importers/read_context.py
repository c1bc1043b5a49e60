"""Context parallelism as other tools say it: how many ranks, how attention runs over them, and what a plan is not told.

    context_parallel_rotate_method = "alltoall"        ring          (torchtitan; Accelerate: cp_comm_strategy)
    --cp-comm-type a2a                                 ulysses       (Megatron-LM)
    parallelism_config_sp_size: 4                      ulysses       (Accelerate, which leaves it to DeepSpeed)
    --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4
                                                       two axes: heads over 2 ranks beside each other, a ring over 4
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.errors import ConfigurationError
from autopar.exporters.uniform import ContextWay
from autopar.exporters.written_configurations import EXCHANGES, ROTATIONS, TWO_LEVELS
from autopar.importers.settings import Settings

WAYS_BY_ROTATION: Mapping[str, ContextWay] = {word: way for way, word in ROTATIONS.items()}
WAYS_BY_EXCHANGE: Mapping[str, ContextWay] = {word: way for way, word in EXCHANGES.items()} | {TWO_LEVELS: "mixed"}
LEVELS = "hierarchical-context-parallel-sizes"
EXCHANGE_FLAGS = ("cp-comm-type", LEVELS)
"""Flags of Megatron-LM with one value or more."""


def rotation(settings: Settings, name: str, cp: int) -> ContextWay | None:
    """The way of torch's context parallelism; None for one rank."""
    way = settings.one_of(name, WAYS_BY_ROTATION, ROTATIONS["gather"])
    return way if cp > 1 else None


def exchange(flags: Settings, cp: int) -> tuple[ContextWay | None, int]:
    """The way of Megatron-LM's context parallelism, and how many ranks beside each other split heads in a ring of the
    others. Raises ConfigurationError for a way per layer, and for sizes that do not make `cp`."""
    words = sorted({str(word) for word in flags.get("cp-comm-type", [EXCHANGES["ring"]])})
    levels = [str(size) for size in flags.get(LEVELS, [])]
    if cp == 1:
        return None, 1
    if len(words) != 1 or words[0] not in WAYS_BY_EXCHANGE:
        raise ConfigurationError(
            f"{flags.where}: cp-comm-type is {' '.join(words) or 'not given'!r}; a plan can be asked for one way in "
            f"all layers, one of {', '.join(WAYS_BY_EXCHANGE)}"
        )
    if words[0] != TWO_LEVELS:
        return WAYS_BY_EXCHANGE[words[0]], 1
    sizes = [int(size) for size in levels if size.isdecimal()]
    if len(levels) != 2 or len(sizes) != 2 or sizes[0] * sizes[1] != cp:
        raise ConfigurationError(
            f"{flags.where}: {LEVELS} is {' '.join(levels) or 'not given'!r}; {TWO_LEVELS} takes two sizes whose "
            f"product is context-parallel-size {cp}: ranks that split heads, and ranks of a ring"
        )
    heads, ring = sizes
    return ("ulysses", 1) if ring == 1 else ("ring", 1) if heads == 1 else ("mixed", heads)


def sequence_ranks(degrees: Settings, prefix: str) -> tuple[int, ContextWay | None]:
    """Ranks among which Accelerate cuts the sequence, and the way: cp_size is torch's, sp_size DeepSpeed's Ulysses."""
    cp, by_heads = degrees.count(f"{prefix}cp_size"), degrees.count(f"{prefix}sp_size")
    way = rotation(degrees, f"{prefix}cp_comm_strategy", cp)
    if by_heads == 1:
        return cp, way
    if cp > 1:
        raise ConfigurationError(
            f"{degrees.where}: {prefix}cp_size is {cp} and {prefix}sp_size is {by_heads}; they exclude each other: set "
            "one to 1"
        )
    return by_heads, "ulysses"


def left_to_the_planner(cp: int, *, order: bool, shards: bool, levels: bool = False) -> tuple[str, ...]:
    """What of context parallelism a plan decides by itself: the order of a causal sequence, where parameters lie over
    these ranks, and which axis does what of two."""
    return tuple(_left(cp, order, shards, levels)) if cp > 1 else ()


def _left(cp: int, order: bool, shards: bool, levels: bool) -> Iterator[str]:
    if order:
        yield "whether a causal sequence lies in zigzag order (load balancing) is the planner's choice"
    if shards:
        yield f"parameters are sharded over cp={cp} as well; where they lie on these ranks is the planner's choice"
    if levels:
        yield "which of cp and cp_inner splits heads is the planner's choice: constraints= pin attention's output"
