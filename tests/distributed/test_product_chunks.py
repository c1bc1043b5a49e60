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
