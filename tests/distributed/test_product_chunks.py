"""Products in chunks on real processes: tensor parallelism computes what the plain model computes."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed


@pytest.mark.exhaustive(sample="mlp")
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_tensor_parallel_products_in_chunks_compute_what_the_plain_model_computes(pool: Pool, name: str) -> None:
    job = "tests.distributed.chunk_jobs:in_chunks"
    for agreement, cut in pool.run(job, world_size=4, timeout=300.0, name=name, chunks=2):
        assert agreement.agrees, agreement
        assert cut > 0


@pytest.mark.parametrize(("world_size", "kind", "chunks"), [
    (2, "one expert has all", 4), (4, "a rank without tokens", 2),
])  # fmt: skip
def test_experts_in_chunks_compute_what_the_plain_model_computes(
    pool: Pool, world_size: int, kind: str, chunks: int
) -> None:
    job = "tests.distributed.chunk_jobs:experts_in_chunks"
    for agreement, same, products in pool.run(job, world_size=world_size, kind=kind, chunks=chunks):
        assert max(agreement.loss_error, agreement.gradient_error) < 1e-12, agreement
        assert same
        assert products == 2 * chunks
