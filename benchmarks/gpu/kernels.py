"""Our kernels against their references: the difference, the seconds, and the share of the memory rate of a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import autopar.runtime.kernels  # noqa: F401 (registers the kernels)
from autopar.runtime.kernels.registry import KERNELS, choose
from benchmarks.gpu.stage import Place, Row, attempted
from benchmarks.gpu.timing import copy_rate, median_seconds
from benchmarks.kernels import calls

LOSSES = ("cross_entropy_rows", "cross_entropy_backward")
"""What also has rows as long as a vocabulary."""


def run(
    place: Place, sizes: Sequence[tuple[int, int]], vocabulary: tuple[int, int], copied_bytes: int
) -> Iterator[Row]:
    """sizes: rows and width of what is measured; vocabulary: those of losses; copied_bytes: whose copy is the limit."""
    rate = copy_rate(place.device, copied_bytes)
    yield {"case": "copy", "bytes_per_second": rate}
    for rows, width in (*sizes, vocabulary):
        for name, arguments in calls(rows, width, str(place.device)):
            if (rows, width) != vocabulary or name in LOSSES:
                case = f"{name} {rows}x{width}"
                yield attempted(case, partial(measured, place, name, arguments, rate))


def measured(place: Place, name: str, arguments: Sequence[Any], rate: float) -> Row:
    """What runs for these arguments, beside the reference. Raises where they differ, or where Triton is not chosen on
    a GPU."""
    kernel = KERNELS.kernels[name]
    choice = choose(kernel, *arguments)
    if place.on_cuda and choice.reason:
        raise AssertionError(f"the reference runs: {choice.reason}")
    found, wanted = tensors_of(choice.run(*arguments)), tensors_of(kernel.reference(*arguments))
    check_close(found, wanted)
    nbytes = sum(x.numel() * x.element_size() for x in [*tensors_of(arguments), *found])
    seconds = median_seconds(lambda: choice.run(*arguments), place.device)
    return {
        "runs": choice.reason or "triton",
        "largest_difference": max(
            float((a.float() - b.float()).abs().max()) for a, b in zip(found, wanted, strict=True)
        ),
        "seconds": seconds,
        "reference_seconds": median_seconds(lambda: kernel.reference(*arguments), place.device),
        "bytes": nbytes,
        "predicted_seconds": nbytes / rate,
        "memory_share": nbytes / rate / seconds,
    }


def check_close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Raises AssertionError where results differ by more than two units in the last place of bf16, or one of fp8."""
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype, f"{one.dtype} instead of {other.dtype}"
        tolerance = 2**-3 if one.dtype.itemsize == 1 else 2e-2
        torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=2e-2)


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors among arguments or results."""
    return [one for one in (values if isinstance(values, tuple | list) else [values]) if isinstance(one, Tensor)]
