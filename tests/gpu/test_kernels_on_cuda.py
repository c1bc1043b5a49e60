"""On CUDA: every operator of ours chooses its Triton kernel and equals its reference; its memory share is known."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import autopar.runtime.kernels  # noqa: F401 (registers the kernels)
from autopar.ops.linear_cross_entropy import LEAST_ROWS
from autopar.runtime.kernels.registry import KERNELS, choose
from benchmarks.gpu.kernels import check_close, run, tensors_of
from benchmarks.gpu.stage import Place
from benchmarks.kernels import calls, grouped_calls, loss_calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.mark.parametrize("sizes", [(64, 4096), (24, 1000), (3000, 64)])
def test_kernels_equal_their_references(sizes: tuple[int, int]) -> None:
    losses = [(name, arguments) for name, arguments, _ in loss_calls(2 * LEAST_ROWS - 70, *sizes, "cuda")]
    grouped = [(name, arguments) for name, arguments, _ in grouped_calls(500, 7, *sizes, "cuda")]
    for name, arguments in [*calls(*sizes, "cuda"), *losses, *grouped]:
        kernel = KERNELS.kernels[name]
        assert choose(kernel, *arguments).reason == ""
        found = getattr(torch.ops.autopar, name)(*arguments)
        check_close(tensors_of(found), tensors_of(kernel.reference(*arguments)))


def test_the_share_of_the_memory_rate_is_measured() -> None:
    place = Place(device=torch.device("cuda"))
    sizes = {
        "sizes": [(1024, 1024)], "vocabulary": (1024, 2048), "loss": (8192, 512, 64), "grouped": (256, 4, 64, 100),
        "attention": (1, 2, 128, 64),
    }  # fmt: skip
    rows = list(run(place, **sizes, copied_bytes=1 << 28))
    assert [row["error"] for row in rows if "error" in row] == []
    shares = [row.get("memory_share", row.get("product_share", 0)) for row in rows[1:-2] if "seconds" in row]
    assert min(shares) > 0
