"""On CUDA: the Triton dropout, the reference on CUDA and the reference on CPU agree."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import autopar.runtime.kernels  # noqa: F401 (registers the kernel)
from autopar.ops.dropout_operator import dropout_by_index, dropout_rows, dropout_rows_reference
from autopar.ops.random_index import Runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [(1, 100_003, 3, 100_003), (257, 129, 5, 513), (4, 4096, (1 << 33) + 2, 8192)])
def test_kernel_equals_reference(dtype: torch.dtype, block: tuple[int, int, int, int]) -> None:
    rows, columns, first, row_stride = block
    x, seed = torch.randn(rows, columns, dtype=dtype), torch.tensor(1 << 40)
    expected = dropout_rows_reference(x, 0.3, seed, 9, first, row_stride, rows)
    on_device = (x.cuda(), 0.3, seed.cuda(), 9, first, row_stride, rows)
    for found in (dropout_rows(*on_device), dropout_rows_reference(*on_device)):
        assert torch.equal(found[1].cpu(), expected[1])
        torch.testing.assert_close(found[0].cpu(), expected[0])


@pytest.mark.parametrize("runs", [(((1, 3),), ((2, 4),), ((0, 6),)), (((1, 3),), ((2, 4),), ((1, 3),))])
def test_blocks_draw_the_same_on_both_devices(runs: Runs) -> None:
    x, seed = torch.randn([sum(length for _, length in dim) for dim in runs]), torch.tensor(5)
    expected = dropout_by_index(x, 0.5, seed, 2, runs, (4, 7, 6))
    found = dropout_by_index(x.cuda(), 0.5, seed.cuda(), 2, runs, (4, 7, 6))
    assert torch.equal(found[1].cpu(), expected[1])
