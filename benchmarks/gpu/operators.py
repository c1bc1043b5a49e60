"""Products of a linear layer in bf16 and in float8: forward, gradient of the input and of the weight.

    forward   x (m, k) @ W^T      dgrad   g (m, n) @ W      wgrad   g^T @ x

Float8 rounds its operands first, and that counts. flop_share: of the best rate that is known of the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import autopar.runtime.kernels  # noqa: F401 (registers the kernels)
from autopar.cost_models.operator_costs import FLOAT8
from autopar.cost_models.operator_sizes import ProductSizes
from autopar.hardware.devices import Device
from benchmarks.gpu.pricing import priced_device, product_seconds
from benchmarks.gpu.stage import Place, Row, attempted
from benchmarks.gpu.timing import median_seconds

WAYS = ("mm", "mm_fp8_rowwise", "mm_fp8_tensorwise")
"""The operator of a product, and those that take its place."""
MOST_DIFFERENCE = {"mm": 1e-2, "mm_fp8_rowwise": 6e-2, "mm_fp8_tensorwise": 6e-2}
"""Of the norm of the product in fp32: three digits of e4m3 round by 2**-4 at most."""


def run(place: Place, layers: Sequence[tuple[int, int, int]]) -> Iterator[Row]:
    """layers: tokens, inputs and outputs of a linear layer."""
    device = priced_device(place)
    for tokens, inputs, outputs in layers:
        torch.manual_seed(0)
        x, weight, grad = (
            torch.randn(*shape, device=place.device, dtype=torch.bfloat16)
            for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        for form, a, b in (("forward", x, weight.t()), ("dgrad", grad, weight), ("wgrad", grad.t(), x)):
            for way in WAYS:
                case = f"{way} {form} {tokens}x{inputs}x{outputs}"
                yield attempted(case, partial(measured, place, way, a, b, device))


def measured(place: Place, way: str, a: Tensor, b: Tensor, device: Device) -> Row:
    """One product. Raises where it is further from fp32 than its digits allow."""
    call = partial(torch.ops.aten.mm if way == "mm" else getattr(torch.ops.autopar, way), a, b)
    wanted = a.float() @ b.float()
    difference = float((call().float() - wanted).norm() / wanted.norm())
    if difference > MOST_DIFFERENCE[way]:
        raise AssertionError(f"the product is {difference:.3f} of its norm away from the one in fp32")
    seconds = median_seconds(call, place.device)
    (m, k), n = a.shape, b.shape[1]
    predicted = product_seconds(ProductSizes(m=m, n=n, k=k), "bfloat16", device, way)
    rate = 2 * m * n * k / seconds
    limit = device.flops_per_second.get("bfloat16" if way == "mm" else FLOAT8)
    return {
        "seconds": seconds,
        "difference": difference,
        "predicted_seconds": predicted,
        "predicted_of_measured": predicted / seconds,
        "flops_per_second": rate,
        "flop_share": rate / limit if limit else None,
    }
