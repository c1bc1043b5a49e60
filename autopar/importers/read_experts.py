"""Expert parallelism in other tools' words: a degree that takes its ranks from other kinds of parallelism.

    torchtitan, shard 8, tensor 2, expert 4      experts over 2 of the ranks that shard, on both of each tensor pair
                                                 -->   dims dp_shard 4, ep 2, tp 2, ep="dispatch"

Here the axis `ep` is one of data parallelism; over the ranks beside it experts are split as the planner finds.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import ConfigurationError
from autopar.importers.settings import Settings


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
