"""Plans whose graphs inductor compiles, on real processes: collectives stay between the compiled pieces."""

from __future__ import annotations

import math

import pytest

from autopar.runtime.kernels.inductor import cpp_compiler
from tests.distributed.pool import Pool

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler is installed"),
]


@pytest.mark.exhaustive(sample="gpt-dims0")
@pytest.mark.parametrize(("name", "dims"), [("gpt", {"tp": 2}), ("llama", {"dp_shard": 2, "tp": 2})])
def test_compiled_pieces_compute_what_the_plain_model_computes(pool: Pool, name: str, dims: dict[str, int]) -> None:
    job, ranks = "tests.distributed.inductor_jobs:in_pieces", math.prod(dims.values())
    for agreement, pieces, compilations in pool.run(job, world_size=ranks, timeout=400.0, name=name, dims=dims):
        assert agreement.agrees, agreement
        assert agreement.gradient_error < 1e-5
        assert compilations < pieces
