"""Collectives made of exchanges give what torch's give."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool

JOBS = "tests.distributed.collective_jobs"


@pytest.mark.parametrize(
    ("world_size", "dtype", "rows", "width", "ranks_per_node"),
    [
        (4, "float32", 3, 5, 4),  # small: an all_reduce gathers all copies
        (4, "float32", 700, 17, 4),
        (4, "float32", 701, 17, 2),  # two nodes of two
        (4, "bfloat16", 700, 33, 2),
        (4, "int64", 300, 17, 1),
        (3, "int8", 5000, 3, 3),
        (3, "float32", 500, 33, 2),  # nodes of two and of one: taken for flat
        (2, "bfloat16", 0, 7, 2),
    ],
)
def test_every_collective_gives_what_torch_gives(
    pool: Pool, world_size: int, dtype: str, rows: int, width: int, ranks_per_node: int
) -> None:
    arguments = {"dtype": dtype, "rows": rows, "width": width, "ranks_per_node": ranks_per_node}
    for found in pool.run(f"{JOBS}:compare", world_size=world_size, **arguments):
        assert all(found.values()), found
