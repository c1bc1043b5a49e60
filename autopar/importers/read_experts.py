"""Expert parallelism in other tools' words: a degree that takes its ranks from other kinds of parallelism.

    torchtitan, shard 8, tensor 2, expert 4      experts over 2 of the ranks that shard, on both of each tensor pair
                                                 -->   dims dp_shard 4, ep 2, tp 2, ep="dispatch"

Here the axis `ep` is one of data parallelism; over the ranks beside it experts are split as the planner finds.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import ConfigurationError
from autopar.exporters.written_configurations import CAPACITY_FACTOR, DROP_POLICY, PADS
from autopar.importers.settings import Settings
from autopar.plans.capacity_factor import CAPPED, check_expert_capacity


def expert_ranks(settings: Settings, name: str, data: int, *, beside: int) -> int:
    """The size of the axis `ep`: the degree `name` without the ranks that it takes whole (`beside`: those of context
    and tensor parallelism). data: ranks of data parallelism that it may take. Raises ConfigurationError where it covers
    no whole part of them."""
    degree = settings.count(name)
    if degree == 1:
        return 1
    if degree % beside or data * beside % degree:
        raise ConfigurationError(
            f"{settings.where}: {name} is {degree}; it takes its ranks from {beside} of context and tensor parallelism "
            f"and {data} of data parallelism: write a multiple of {beside} that divides {data * beside}"
        )
    return degree // beside


def experts_elsewhere(settings: Settings, name: str, *, beside: int) -> Iterator[str]:
    """That experts are split over ranks of other axes as well."""
    if settings.count(name) > 1 and beside > 1:
        yield (
            f"experts are split over {beside} ranks of context and tensor parallelism, too; how their products run "
            "over these is the planner's choice"
        )


def expert_capacity(settings: Settings, ep: int) -> float | None:
    """How many times its even share of a rank's rows an expert takes, over `ep` ranks; None: all of them, as the tool
    takes a negative number, too. Raises ConfigurationError for what is no factor."""
    said = settings.get(CAPACITY_FACTOR)
    if said is None:
        return None
    try:
        factor = float(said)
        if factor < 0:
            return None
        check_expert_capacity(CAPPED, factor)
    except (TypeError, ValueError, ConfigurationError):
        raise ConfigurationError(
            f"{settings.where}: {CAPACITY_FACTOR} is {said!r}; write a number above 0, such as 1.25"
        ) from None
    return factor if ep > 1 else None


def capacity_elsewhere(settings: Settings, ep: int) -> Iterator[str]:
    """What a capacity is in the tool and not in a plan."""
    if settings.get(CAPACITY_FACTOR) is None or str(settings.get(CAPACITY_FACTOR)).startswith("-"):
        return
    if ep == 1:
        yield f"{CAPACITY_FACTOR}: a plan drops rows over an axis ep alone"
        return
    if settings.get(DROP_POLICY, "probs") != "position":
        yield f"{DROP_POLICY} probs: a plan drops the last rows of an expert, not those of the lowest probability"
    if not settings.get(PADS):
        yield f"no {PADS}: in a plan every rank sends as many rows to every expert, padded with zeros"
