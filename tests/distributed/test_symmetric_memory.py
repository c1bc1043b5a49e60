"""Products in symmetric memory on real processes, by torch's fallbacks: loss and gradients of the plain model."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.symmetric_jobs"


@pytest.mark.parametrize(("dim", "micro_batches"), [(0, 1), (1, 1), (1, 2)])
def test_both_operators_compute_what_the_plain_model_computes(pool: Pool, dim: int, micro_batches: int) -> None:
    job = f"{JOBS}:in_symmetric_memory"
    for agreement, ran, mapped in pool.run(job, world_size=2, dim=dim, micro_batches=micro_batches):
        assert agreement.agrees, agreement
        kinds = [call.partition(" of ")[0] for call in ran]
        assert kinds.count("gathered_products") == 2 * micro_batches  # one in each pass
        assert kinds.count("product_scattered") == 3 * micro_batches  # two of them in backward
        assert mapped == 1


@pytest.mark.parametrize("mutation", ["reduction", "scatter dim", "gather dim"])
def test_wrong_arguments_of_the_operators_are_noticed(pool: Pool, mutation: str) -> None:
    for agreement, _, _ in pool.run(f"{JOBS}:in_symmetric_memory", world_size=2, dim=1, mutation=mutation):
        assert not agreement.agrees


def test_ranks_without_it_say_so_and_compute_the_same(pool: Pool) -> None:
    for agreement, said, has_calls in pool.run(f"{JOBS}:without_symmetric_memory", world_size=2, dim=1):
        assert agreement.agrees, agreement
        assert not has_calls
        (line,) = said
        assert line.startswith(
            "the plan runs products over tp with their collective in symmetric memory, and the ranks run on cpu, which "
        )
