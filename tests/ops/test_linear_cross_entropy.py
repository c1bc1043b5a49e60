"""Product and cross-entropy in chunks equal those over all logits, which are never made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ops import linear_cross_entropy as ours
from autopar.ops.cross_entropy import aligned_columns, log_probability, rescaled_total

ROWS, WORDS, WIDTH = 4200, 90, 16
"""Two chunks of different lengths."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-7}


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight and a target of which a tenth is ignored."""
    torch.manual_seed(3)
    hidden, weight = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randn(WORDS, WIDTH, dtype=dtype)
    return hidden, weight, torch.randint(WORDS, (ROWS,)).masked_fill(torch.rand(ROWS) < 0.1, -100)


def plain(hidden: Tensor, weight: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and both gradients by torch, in fp64."""
    wide, table = (x.double().requires_grad_() for x in (hidden, weight))
    losses = functional.cross_entropy(wide @ table.t(), target, reduction="none")
    return losses.detach(), *torch.autograd.grad(losses, (wide, table), scale.double())


def in_blocks(
    hidden: Tensor, weight: Tensor, target: Tensor, scale: Tensor, blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by ranks that hold blocks of the vocabulary each; all_reduces are sums and maxima here."""
    parts = weight.chunk(blocks)
    starts = [index * len(parts[0]) for index in range(blocks)]
    found = [ours.linear_cross_entropy(hidden, part, target, start) for part, start in zip(parts, starts, strict=True)]
    top = torch.stack([maximum for maximum, _, _ in found]).amax(0)
    log_total = sum(rescaled_total(total, maximum, top) for maximum, total, _ in found).log()
    chosen = [
        log_probability(picked, target, top, log_total, start, len(part))
        for (_, _, picked), part, start in zip(found, parts, starts, strict=True)
    ]
    grads = [
        ours.linear_cross_entropy_backward(hidden, part, target, top, log_total, scale, start)
        for part, start in zip(parts, starts, strict=True)
    ]
    return -sum(chosen), sum(grad.double() for grad, _ in grads), torch.cat([grad for _, grad in grads])


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_losses_and_gradients_are_those_of_torch(dtype: torch.dtype, blocks: int) -> None:
    hidden, weight, target = operands(dtype)
    assert ours.chunk_rows(ROWS, WORDS, WIDTH) == 2176
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = torch.rand(ROWS, dtype=wide).masked_fill(target < 0, 0)
    found, expected = in_blocks(hidden, weight, target, scale, blocks), plain(hidden, weight, target, scale)
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < TOLERANCE[dtype]
    ignored = target < 0
    assert found[0][ignored].abs().max() == 0
    assert found[1][ignored].abs().max() == 0


def test_sums_over_chunks_keep_the_digits_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 many small parts would be lost beside their sum: one row a chunk, each of the same gradient."""
    monkeypatch.setattr(ours, "chunk_rows", lambda *_: 1)
    hidden, target = torch.ones(1000, 1).bfloat16(), torch.zeros(1000, dtype=torch.int64)
    zeros, scale = torch.zeros(1000), torch.full((1000,), -1.0)
    weight = torch.tensor([[-2.0], [0.0]]).bfloat16()
    _, grad = ours.linear_cross_entropy_backward(hidden, weight, target, zeros, zeros, scale, 1)
    assert grad[1].item() == -1000
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        total += 1
    assert total.item() == 256, "sums in bf16 stand still"


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            self.elements = max(self.elements, one.untyped_storage().nbytes() // one.element_size())
        return result


def largest(rows: int, words: int, width: int) -> int:
    """Elements of the largest tensor that forward and backward make, on the meta device."""
    hidden, weight = (torch.empty(size, width, device="meta").bfloat16() for size in (rows, words))
    target, statistics = (torch.empty(rows, dtype=dtype, device="meta") for dtype in (torch.int64, torch.float32))
    with _Largest() as made:
        ours.linear_cross_entropy_reference(hidden, weight, target, 0)
        ours.linear_cross_entropy_backward_reference(hidden, weight, target, *[statistics] * 3, 0)
    return made.elements


SIZES = [(32768, 50257, 768), (65536, 128256, 8192), (65536, 16032, 4096), (8192, 50304, 1600)]


@pytest.mark.parametrize("sizes", SIZES)
def test_nothing_is_larger_than_a_chunk(sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, words, width = sizes
    chunk = ours.chunk_rows(*sizes)
    assert chunk <= max(ours.LEAST_ROWS, width, rows * width / words) + ours.MULTIPLE
    columns = aligned_columns(words, torch.bfloat16)
    assert largest(*sizes) == max(chunk * columns, rows * width)
    monkeypatch.setattr(ours, "chunk_rows", lambda rows, words, width: rows)
    assert largest(*sizes) == rows * columns, "whole logits are seen"


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [((65536, 128256, 8192), 8192), ((32768, 50257, 768), 4096), ((100, 50, 8), 128), ((9000, 100, 512), 9088),
     ((0, 50, 8), 128), ((5, 0, 8), 128), ((4097, 4000, 8), 2176)],
)  # fmt: skip
def test_rows_of_a_chunk(sizes: tuple[int, int, int], rows: int) -> None:
    assert ours.chunk_rows(*sizes) == rows


@pytest.mark.parametrize(("rows", "words"), [(0, 5), (3, 0)])
def test_no_rows_and_no_words(rows: int, words: int) -> None:
    hidden, weight, target = torch.randn(rows, 4), torch.randn(words, 4), torch.zeros(rows, dtype=torch.int64)
    assert [x.shape for x in ours.linear_cross_entropy(hidden, weight, target, 0)] == [(rows,)] * 3
    zeros = torch.zeros(rows)
    grads = ours.linear_cross_entropy_backward(hidden, weight, target, zeros, zeros, zeros, 0)
    for grad, of in zip(grads, (hidden, weight), strict=True):
        assert torch.equal(grad, torch.zeros_like(of))


def test_fake_tensors_are_those_of_the_operators() -> None:
    hidden, weight, target = operands(torch.bfloat16)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(ours.linear_cross_entropy, (hidden, weight, target, 7), test_utils=utils)
    arguments = (hidden, weight, target, *torch.rand(3, ROWS).unbind(), 7)
    torch.library.opcheck(ours.linear_cross_entropy_backward, arguments, test_utils=utils)
