"""Which fused kernel computes which attention, and that those of CUDA accept what they are given: on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ops import attention_math, capability
from autopar.ops.attention_formulas import Draws, ScoreOptions
from autopar.ops.attention_kernels import fused_kernel
from autopar.ops.attention_math import attend, attend_backward, attend_backward_with_mask
from autopar.ops.random_index import full_runs
from benchmarks.fake_cuda.tensors import fake_cuda

CUDNN, FLASH, EFFICIENT = (f"_scaled_dot_product_{name}_attention" for name in ("cudnn", "flash", "efficient"))
CUT = {"rows": ((0, 512), (1536, 512)), "is_causal": True}
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CASES = {
    "whole": (BF16, (4, 64), (2048, 2048), {}, CUDNN, 1),
    "causal": (FP16, (4, 64), (2048, 2048), {"is_causal": True}, CUDNN, 1),
    "grouped queries": (BF16, (2, 64), (2048, 2048), {"is_causal": True}, CUDNN, 1),
    "odd head size": (BF16, (4, 36), (2048, 2048), {}, CUDNN, 1),
    "two head sizes": (BF16, (4, 64, 40), (2048, 2048), {}, CUDNN, 1),
    "heads too large for cudnn": (BF16, (4, 256), (2048, 2048), {}, FLASH, 1),
    "large heads": (BF16, (4, 512), (2048, 2048), {}, EFFICIENT, 1),
    "fp32": (FP32, (4, 64), (2048, 2048), {}, EFFICIENT, 1),
    "fp32, grouped": (FP32, (2, 64), (2048, 2048), {}, EFFICIENT, 2),
    "cut causal": (BF16, (4, 64), (1024, 2048), CUT, CUDNN, 3),
    "more rows than keys": (BF16, (4, 64), (2048, 960), {"is_causal": True}, CUDNN, 2),
    "bool mask": (BF16, (4, 64), (2048, 1604), {"mask": ((2048, 1604), torch.bool)}, EFFICIENT, 1),
    "mask by head": (BF16, (4, 64), (1604, 960), {"mask": ((1, 4, 1604, 960), FP32)}, EFFICIENT, 1),
    "mask and causal": (BF16, (4, 64), (640, 640), {"mask": ((640, 640), torch.bool), "is_causal": True}, EFFICIENT, 1),
}  # fmt: skip


class Called(TorchDispatchMode):
    """Names of attention operators, and the most elements of any result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.names += [name] if "attention" in name else []
        outputs = result if isinstance(result, tuple | list) else (result,)
        self.largest = max(self.largest, *(x.numel() if isinstance(x, Tensor) else 0 for x in outputs))
        return result


@pytest.fixture
def fake() -> Iterator[None]:
    with fake_cuda():
        yield


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("case", CASES)
def test_cuda_runs_a_fused_kernel_and_nothing_of_the_size_of_scores(case: str) -> None:
    dtype, (groups, *sizes), (rows, keys), given, name, calls = CASES[case]
    size, value_size = sizes[0], sizes[-1]
    options = dict(given)
    if "mask" in options:
        shape, mask_dtype = options["mask"]
        options["mask"] = torch.zeros(shape, dtype=mask_dtype, device="cuda")
    query = torch.empty(2, 4, rows, size, dtype=dtype, device="cuda")
    key, value = (torch.empty(2, groups, keys, each, dtype=dtype, device="cuda") for each in (size, value_size))
    scores = ScoreOptions(**options)
    with Called() as forward:
        out, sums = attend(query, key, value, scores)
    with Called() as backward:
        grads = attend_backward(torch.empty_like(out), query, key, value, out, sums, scores)
    assert forward.names == [name] * calls
    assert backward.names == [f"{name}_backward"] * calls
    assert (out.shape, out.dtype, out.device.type) == ((2, 4, rows, value_size), dtype, "cuda")
    assert (sums.shape, sums.dtype) == ((2, 4, rows), torch.float32)
    assert [g.shape for g in grads] == [query.shape, key.shape, value.shape]
    if case not in ("bool mask", "mask by head", "mask and causal"):  # such a mask is of this size itself
        assert max(forward.largest, backward.largest) < 2 * 4 * rows * keys


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("groups", [4, 2])
def test_ampere_runs_flash(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    monkeypatch.setattr(capability, "FAKE_CAPABILITY", (8, 0))
    query = torch.empty(2, 4, 256, 64, dtype=BF16, device="cuda")
    key = torch.empty(2, groups, 256, 64, dtype=BF16, device="cuda")
    with Called() as called:
        out, sums = attend(query, key, key, ScoreOptions(is_causal=True))
        grads = attend_backward(out, query, key, key, out, sums, ScoreOptions(is_causal=True))
    assert called.names == [FLASH, f"{FLASH}_backward"]
    assert [g.shape for g in (out, *grads)] == [query.shape, query.shape, key.shape, key.shape]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("mask_shape", [None, (2, 1, 1, 1, 512), (2, 1, 4, 512, 512)], ids=str)
def test_cuda_runs_a_kernel_of_ours_where_torch_has_none(mask_shape: tuple[int, ...] | None) -> None:
    """Dropout, and a mask over one of two batch dims with its gradient."""
    query = torch.empty(2, 8, 4, 512, 32, dtype=BF16, device="cuda")
    mask = None if mask_shape is None else torch.empty(mask_shape, dtype=BF16, device="cuda")
    shape = (2, 8, 4, 512, 512)
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    options = ScoreOptions(mask=mask, dropout_p=0.1, draws=Draws(shape, full_runs(shape), seed, 3))
    with Called() as called:
        out, sums = attend(query, query, query, options)
        if mask is None:
            grads = attend_backward(out, query, query, query, out, sums, options)
        else:
            grads = attend_backward_with_mask(out, query, query, query, out, sums, options)
    assert called.names == ["autopar::indexed_attention", "autopar::indexed_attention_backward"]
    assert [g.shape for g in grads] == [query.shape] * 3 + ([] if mask is None else [mask.shape])
    assert (out.shape, sums.shape, sums.dtype) == (query.shape, query.shape[:-1], torch.float32)
    assert called.largest < math.prod(shape), "nothing of the size of the scores"


@pytest.mark.parametrize("dims", [3, 4])
def test_few_batch_dims_and_a_wide_mask_give_what_the_formula_gives(dims: int) -> None:
    torch.manual_seed(0)
    batch = (2,) * (dims - 3)
    query, key, value = (torch.randn(*batch, h, s, 8) for h, s in ((4, 6), (2, 7), (2, 7)))
    options = ScoreOptions(mask=torch.randn(4, 6, 7))
    expected = attend(query, key, value, options)
    found = attention_math.indexed_attention(*attention_math._indexed(query, key, value, options))
    torch.testing.assert_close(found[0].reshape(expected[0].shape), expected[0])


def test_the_operator_of_ours_gives_what_the_formula_gives() -> None:
    """On CPUs by its reference: the same numbers as the operator by index, dropout included."""
    torch.manual_seed(0)
    query, grad = torch.randn(2, 3, 4, 6, 8), torch.randn(2, 3, 4, 6, 5)
    key, value, mask = torch.randn(2, 3, 2, 8, 8), torch.randn(2, 3, 2, 8, 5), torch.randn(2, 1, 4, 6, 8)
    shape, runs = (2, 6, 4, 12, 16), (((0, 2),), ((3, 3),), ((0, 4),), ((6, 6),), ((4, 8),))
    options = ScoreOptions(mask=mask, is_causal=True, rows=runs[-2], keys=runs[-1], dropout_p=0.3,
                           draws=Draws(shape, runs, torch.tensor(5), 7))  # fmt: skip
    expected = attend(query, key, value, options)
    found = attention_math.indexed_attention(*attention_math._indexed(query, key, value, options))
    torch.testing.assert_close(found[0].reshape(expected[0].shape), expected[0])
    torch.testing.assert_close(found[1].reshape(expected[1].shape), expected[1])
    grads = attend_backward_with_mask(grad, query, key, value, *expected, options)
    ours = attention_math._indexed_backward(grad, query, key, value, *expected, options, with_mask=True)
    for one, wanted in zip(ours, grads, strict=True):
        torch.testing.assert_close(one.reshape(wanted.shape), wanted)


@pytest.mark.usefixtures("fake")
def test_a_formula_remains_where_there_is_no_kernel() -> None:
    double = torch.empty(2, 4, 8, 8, dtype=FP64, device="cuda")
    assert fused_kernel(double, double, False) is None
    with Called() as called:
        attend(double, double, double, ScoreOptions())
    assert called.names == []


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16, FP16], ids=str)
def test_the_cpu_has_one_kernel_for_all(dtype: torch.dtype) -> None:
    query = torch.zeros(1, 2, 4, 8, dtype=dtype)
    kernel = fused_kernel(query, query, True)
    assert kernel is not None
    assert kernel.name == "flash_attention_for_cpu"


@pytest.mark.parametrize("mask_shape", [(6, 7), (3, 1, 6, 7), (1, 4, 6, 7), (4, 1, 7), (1, 7)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_bool", [False, True])
def test_masks_give_what_the_formula_gives(mask_shape: tuple[int, ...], is_causal: bool, is_bool: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, h, s, 8, dtype=FP64) for h, s in ((4, 6), (2, 7), (2, 7)))
    mask = torch.randn(mask_shape, dtype=FP64)
    mask = mask > -0.5 if is_bool else mask
    options = {"mask": mask, "is_causal": is_causal}
    everything = torch.ones(3, 4, 6, 7, dtype=torch.bool)
    found, wanted = ScoreOptions(**options), ScoreOptions(**options, kept=everything)
    with Called() as called:
        out, sums = attend(query, key, value, found)
    assert called.names == ["_scaled_dot_product_flash_attention_for_cpu"] * 2
    by_formula = attend(query, key, value, wanted)
    torch.testing.assert_close(out, by_formula[0])
    grad = torch.randn_like(out)
    torch.testing.assert_close(
        attend_backward(grad, query, key, value, out, sums, found),
        attend_backward(grad, query, key, value, *by_formula, wanted),
    )
