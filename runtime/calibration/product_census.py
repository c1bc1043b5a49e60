"""The operators of a profile that are measured by their FLOPs: products, attention, convolutions, experts.

    mm (8, 16) @ (16, 8), ... (1024, 512) @ (512, 1024)      attention of 1 to 16 batches, of 32 to 1,024 tokens

FLOPs are those that are computed: of a causal mask `causal_share_on_cpu`, an expert multiplies its rows only.
Attention is measured with heads of 64, and once with narrow ones, which tell the softmax of a pair from its products
(`measured_softmax_dims`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar import ops as _operators  # registers autopar.attention  # noqa: F401
from autopar.cost_models.operators_attention import CPU_HEAD_DIM, CPU_NARROW_DIM, NARROW, causal_share_on_cpu

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One operator at one size. work: FLOPs of a product, else bytes read and written; calls: how many `call` makes."""

    name: str
    work: float
    call: Callable[[], object]
    calls: int = 1


MATMUL_SHAPES = (
    (8, 16, 8), (64, 64, 64), (64, 512, 128), (256, 256, 64), (128, 1024, 128),
    (256, 256, 256), (256, 512, 512), (1024, 256, 512), (512, 1024, 1024), (1024, 512, 2048),
)  # fmt: skip
"""m, k, n of m k @ k n."""
BATCHED_SHAPES = ((8, 16, 16, 16), (32, 64, 32, 64), (32, 96, 64, 96), (32, 128, 64, 128), (32, 256, 64, 256))
"""batch, m, k, n."""
ATTENTION_SHAPES = ((2, 4, 32), (8, 4, 64), (8, 4, 100), (16, 4, 65), (8, 8, 128), (4, 8, 256))
"""batch, heads, sequence."""
LONG_SHAPE = (1, 8, 1024)
"""The same: where pairs take nearly all of the time, with wide and with narrow heads."""
CONVOLUTION_SHAPES = ((4, 16, 16, 16), (4, 32, 32, 24), (8, 32, 32, 32), (8, 64, 64, 16), (8, 64, 64, 32))
"""batch, channels in and out, height and width; 3 x 3."""
EXPERT_SHAPES = ((64, 64, 64), (512, 128, 256), (2048, 256, 256))
"""rows, k, n of eight experts that share the rows evenly."""
EXPERTS = 8

NUM_PRODUCTS = (
    len(MATMUL_SHAPES)
    + len(BATCHED_SHAPES)
    + 3 * len(ATTENTION_SHAPES)
    + 4  # of the long shape
    + 2 * (len(CONVOLUTION_SHAPES) + len(EXPERT_SHAPES))
)


def products() -> Iterator[Sample]:
    """All of them, in a fixed order."""
    yield from _products()
    yield from _attention()
    yield from _convolutions()
    yield from _experts()


def _linear(x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """The three products of a linear layer: its output and the gradients of x and of the weight, laid out as there."""
    aten.mm.default(x, weight.t())
    aten.mm.default(gradient, weight)
    aten.mm.default(gradient.t(), x)


def _products() -> Iterator[Sample]:
    for m, k, n in MATMUL_SHAPES:
        call = partial(_linear, torch.randn(m, k), torch.randn(n, k), torch.randn(m, n))
        yield Sample(name="mm", work=2.0 * m * k * n, call=call, calls=3)
    for batch, m, k, n in BATCHED_SHAPES:
        call = partial(aten.bmm.default, torch.randn(batch, m, k), torch.randn(batch, k, n))
        yield Sample(name="bmm", work=2.0 * batch * m * k * n, call=call)


def _attention() -> Iterator[Sample]:
    for shape in ATTENTION_SHAPES:
        yield from _attention_of(*shape, CPU_HEAD_DIM)
        yield _masked_backward(*shape)
    yield from _attention_of(*LONG_SHAPE, CPU_HEAD_DIM)
    yield from _attention_of(*LONG_SHAPE, CPU_NARROW_DIM, NARROW)


def _attention_of(batch: int, heads: int, sequence: int, width: int, suffix: str = "") -> Iterator[Sample]:
    """Causal, forward and backward."""
    kernels, options = torch.ops.autopar, (0.0, True, None, 0)
    query, key, value = (torch.randn(batch, heads, sequence, width) for _ in range(3))
    scores = 2.0 * batch * heads * sequence**2 * width * float(causal_share_on_cpu(sequence, sequence))
    out, logsumexp = kernels.attention.default(query, key, value, None, *options)
    forward = partial(kernels.attention.default, query, key, value, None, *options)
    yield Sample(name=f"attention{suffix}", work=2 * scores, call=forward)
    back = partial(kernels.attention_backward.default, out, query, key, value, None, out, logsumexp, *options)
    yield Sample(name=f"attention_backward{suffix}", work=5 * scores, call=back)


def _masked_backward(batch: int, heads: int, sequence: int) -> Sample:
    """With a gradient for the mask."""
    kernel, options = torch.ops.autopar.attention_backward_with_mask.default, (0.0, False, None, 0)
    query, key, value = (torch.randn(batch, heads, sequence, CPU_HEAD_DIM) for _ in range(3))
    out, logsumexp = torch.ops.autopar.attention.default(query, key, value, None, *options)
    mask = torch.zeros(1, heads, sequence, sequence)
    call = partial(kernel, out, query, key, value, mask, out, logsumexp, *options)
    work = 10.0 * batch * heads * sequence**2 * CPU_HEAD_DIM
    return Sample(name="attention_backward_with_mask", work=work, call=call)


def _convolutions() -> Iterator[Sample]:
    options: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for batch, channels_in, channels_out, size in CONVOLUTION_SHAPES:
        x, weight = torch.randn(batch, channels_in, size, size), torch.randn(channels_out, channels_in, 3, 3)
        out = aten.convolution.default(x, weight, None, *options)
        flops = 2.0 * batch * channels_in * channels_out * 9 * size * size
        yield Sample(name="convolution", work=flops, call=partial(aten.convolution.default, x, weight, None, *options))
        back = partial(aten.convolution_backward.default, out, x, weight, [0], *options, [True, True, False])
        yield Sample(name="convolution_backward", work=2 * flops, call=back)


def _experts() -> Iterator[Sample]:
    """Of rows in order, as lowered graphs hold them."""
    linear, outer = torch.ops.autopar.sorted_expert_linear.default, torch.ops.autopar.sorted_expert_outer.default
    for rows, k, n in EXPERT_SHAPES:
        x, weight, grad = torch.randn(rows, k), torch.randn(EXPERTS, k, n), torch.randn(rows, n)
        counts = torch.full((EXPERTS,), rows // EXPERTS)
        yield Sample(name="expert_linear", work=2.0 * rows * k * n, call=partial(linear, x, weight, counts, False))
        yield Sample(name="expert_outer", work=2.0 * rows * k * n, call=partial(outer, x, grad, counts, False))
