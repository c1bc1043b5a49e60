"""Our kernels against their references: the difference, the seconds, and the share of the memory rate of a copy, or of
the rate of one of torch's products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import autopar.runtime.kernels  # noqa: F401 (registers the kernels)
from autopar.ops.cross_entropy import aligned_columns
from autopar.runtime.kernels.registry import KERNELS, choose
from benchmarks.gpu.stage import Place, Row, attempted
from benchmarks.gpu.timing import copy_rate, median_seconds, product_rate
from benchmarks.kernels import attention_calls, calls, grouped_calls, loss_calls

LOSSES = ("cross_entropy_rows", "cross_entropy_backward")
"""What also has rows as long as a vocabulary."""
READ_TWICE = ("quantised_tensor",)
"""What looks at all its operands before it writes."""
TOLERANCE = 2.0**-6
"""Of the norm of a result: two units in the last place of bf16."""


def run(
    place: Place,
    sizes: Sequence[tuple[int, int]],
    vocabulary: tuple[int, int],
    loss: tuple[int, int, int],
    grouped: tuple[int, int, int, int],
    attention: tuple[int, int, int, int],
    copied_bytes: int,
) -> Iterator[Row]:
    """sizes: rows and width of what is measured; vocabulary: those of losses; loss: rows, words and width of one in
    chunks, whose product at once (of aligned words) is its limit; grouped: rows, runs, inner and columns of products by
    runs, whose limit is one product of all rows; attention: batch, heads, length and head size; copied_bytes: whose
    copy is the limit of the others."""
    rate = copy_rate(place.device, copied_bytes)
    yield {"case": "copy", "bytes_per_second": rate}
    for rows, width in (*sizes, vocabulary):
        for name, arguments in calls(rows, width, str(place.device)):
            if (rows, width) != vocabulary or name in LOSSES:
                case = f"{name} {rows}x{width}"
                yield attempted(case, partial(measured, place, name, arguments, rate))
    device = str(place.device)
    rows, words, width = loss
    aligned = aligned_columns(words, torch.bfloat16)
    yield from _products(place, loss, (rows, width, aligned), loss_calls(*loss, device))
    rows, _, inner, columns = grouped
    yield from _products(place, grouped, (rows, inner, columns), grouped_calls(*grouped, device))
    for name, arguments in attention_calls(*attention, str(place.device)):
        yield attempted(f"{name} {'x'.join(map(str, attention))}", partial(measured, place, name, arguments, None))


def _products(
    place: Place,
    sizes: tuple[int, ...],
    product: tuple[int, int, int],
    operators: Iterable[tuple[str, tuple[Any, ...], int]],
) -> Iterator[Row]:
    """Operators that products bound, beside the rate of one product of (rows, inner, columns)."""
    rate = product_rate(place.device, *product)
    yield {"case": f"product {'x'.join(map(str, product))}", "operations_per_second": rate}
    for name, arguments, operations in operators:
        case = f"{name} {'x'.join(map(str, sizes))}"
        yield attempted(case, partial(measured_product, place, name, arguments, operations / rate))


def measured(place: Place, name: str, arguments: Sequence[Any], rate: float | None) -> Row:
    """What runs for these arguments, beside the reference. rate: bytes per second, of what memory bounds. Raises where
    they differ, or where Triton is not chosen on a GPU."""
    kernel = KERNELS.kernels[name]
    choice = choose(kernel, *arguments)
    if place.on_cuda and choice.reason:
        raise AssertionError(f"the reference runs: {choice.reason}")
    found, wanted = tensors_of(choice.run(*arguments)), tensors_of(kernel.reference(*arguments))
    row: Row = {"runs": choice.reason or "triton", "differences": check_close(found, wanted)}
    row["seconds"] = median_seconds(lambda: choice.run(*arguments), place.device)
    row["reference_seconds"] = median_seconds(lambda: kernel.reference(*arguments), place.device)
    if rate is not None:
        operands = tensors_of(arguments) * (2 if name in READ_TWICE else 1)
        row["bytes"] = sum(x.numel() * x.element_size() for x in [*operands, *found])
        row["predicted_seconds"] = row["bytes"] / rate
        row["memory_share"] = row["predicted_seconds"] / row["seconds"]
    return row


def measured_product(place: Place, name: str, arguments: Sequence[Any], limit: float) -> Row:
    """As `measured`, of what products bound. limit: their seconds, by the rate of one."""
    row = measured(place, name, arguments, None)
    return {**row, "predicted_seconds": limit, "product_share": limit / float(row["seconds"])}


def check_close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """How far each result is away, by its norm. Raises AssertionError where that is more than `TOLERANCE`."""
    differences = []
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), f"{one.dtype} {one.shape}, not {other.dtype}"
        norm = other.float().norm().clamp_min(1e-30)
        differences.append(float((one.float() - other.float()).norm() / norm))
        assert differences[-1] <= TOLERANCE, f"result {len(differences)} is {differences[-1]:.3g} of its norm away"
    return differences


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors among arguments or results."""
    return [one for one in (values if isinstance(values, tuple | list) else [values]) if isinstance(one, Tensor)]
