"""The operators that a profile measures: what a training step spends its time on, at sizes from cache to memory.

    for sample in samples(): seconds = time(sample.call); ...       # "tanh" at 2**18 elements, "mm" of 256 rows

A product is measured by its FLOPs, any other operator by the bytes that it reads and writes, counted as the prices of
the planner count them (`planner/prices.py`), so that a curve through the samples answers what the planner asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autopar import ops as _operators  # registers autopar.attention  # noqa: F401
from autopar._compat import lone_device_mesh
from autopar.cost_models.operators import OPTIMIZER

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One operator at one size. work: FLOPs of a product, else bytes read and written."""

    name: str
    work: float
    call: Callable[[], object]


def _moved(arguments: Sequence[Any], results: Any) -> int:
    """Bytes of all tensors among arguments and results."""
    found = [*arguments, *(results if isinstance(results, tuple | list) else (results,))]
    return sum(value.numel() * value.element_size() for value in found if isinstance(value, Tensor))


ADAMW_TRAFFIC_BYTES = 28
"""Per float32 element, as the planner counts: parameter, gradient and the new parameter, two moments in and out."""
ROWS = 256
"""Elements of the last dim of operators that work on rows."""

Maker = Callable[[int], tuple[Any, ...]]


def _one(elements: int) -> tuple[Tensor]:
    return (torch.rand(elements // ROWS, ROWS) + 0.5,)


def _two(elements: int) -> tuple[Tensor, Tensor]:
    return (*_one(elements), *_one(elements))


def _norm(elements: int) -> tuple[Any, ...]:
    return (*_one(elements), [ROWS], torch.ones(ROWS), torch.zeros(ROWS), 1e-5)


def _norm_backward(elements: int) -> tuple[Any, ...]:
    x = _one(elements)[0]
    _, mean, scale = aten.native_layer_norm(x, [ROWS], torch.ones(ROWS), torch.zeros(ROWS), 1e-5)
    return (x, x, [ROWS], mean, scale, torch.ones(ROWS), torch.zeros(ROWS), [True, True, True])


MEMORY_OPERATORS: dict[str, tuple[Callable[..., Any], Maker]] = {
    "add": (aten.add.Tensor, _two),
    "mul": (aten.mul.Tensor, _two),
    "div": (aten.div.Tensor, _two),
    "pow": (lambda x: aten.pow.Tensor_Scalar(x, 3.0), _one),
    "exp": (aten.exp.default, _one),
    "log": (aten.log.default, _one),
    "sqrt": (aten.sqrt.default, _one),
    "rsqrt": (aten.rsqrt.default, _one),
    "tanh": (aten.tanh.default, _one),
    "tanh_backward": (aten.tanh_backward.default, _two),
    "sigmoid": (aten.sigmoid.default, _one),
    "sin": (aten.sin.default, _one),
    "cos": (aten.cos.default, _one),
    "erf": (aten.erf.default, _one),
    "relu": (aten.relu.default, _one),
    "threshold_backward": (lambda a, b: aten.threshold_backward(a, b, 0.0), _two),
    "gelu": (aten.gelu.default, _one),
    "gelu_backward": (aten.gelu_backward.default, _two),
    "silu": (aten.silu.default, _one),
    "silu_backward": (aten.silu_backward.default, _two),
    "where": (lambda x, y: aten.where.self(x > y, x, y), _two),
    "clone": (aten.clone.default, _one),
    "sum": (lambda x: aten.sum.dim_IntList(x, [0]), _one),
    "mean": (lambda x: aten.mean.dim(x, [-1], True), _one),
    "amax": (lambda x: aten.amax.default(x, [-1], True), _one),
    "var_mean": (lambda x: aten.var_mean.correction(x, [-1], correction=0, keepdim=True), _one),
    "cumsum": (lambda x: aten.cumsum.default(x, 0), _one),
    "cat": (lambda x, y: aten.cat.default([x, y], -1), _two),
    "native_layer_norm": (aten.native_layer_norm.default, _norm),
    "native_layer_norm_backward": (aten.native_layer_norm_backward.default, _norm_backward),
    "_softmax": (lambda x: aten._softmax.default(x, -1, False), _one),
    "_softmax_backward_data": (lambda x, y: aten._softmax_backward_data(x, y, -1, torch.float32), _two),
    "_log_softmax": (lambda x: aten._log_softmax.default(x, -1, False), _one),
    "_log_softmax_backward_data": (lambda x, y: aten._log_softmax_backward_data(x, y, -1, torch.float32), _two),
    "native_dropout": (lambda x: aten.native_dropout.default(x, 0.1, True), _one),
}
"""ATen name -> (call, arguments for a number of elements)."""

ELEMENTS = (1 << 8, 1 << 13, 1 << 17, 1 << 20)
"""1 KB, 32 KB, 512 KB and 4 MB of float32: nothing but overhead, in the first cache, in the second, in memory."""
MATMUL_SHAPES = ((8, 16, 8), (64, 64, 64), (256, 256, 64), (256, 256, 256), (1024, 256, 256), (1024, 512, 1024))
ATTENTION_SHAPES = ((2, 4, 32, 32), (4, 4, 128, 64), (4, 8, 256, 64))
"""batch, heads, sequence, width of a head."""
CONVOLUTION_SHAPES = ((4, 16, 16, 16), (8, 32, 32, 32), (8, 64, 64, 32))
"""batch, channels in and out, height and width; 3 x 3."""


NUM_SAMPLES = (
    2 * (len(MATMUL_SHAPES) + len(ATTENTION_SHAPES) + len(CONVOLUTION_SHAPES))
    + (len(MEMORY_OPERATORS) + 3) * len(ELEMENTS)
)  # fmt: skip


def samples() -> Iterator[Sample]:
    """Every operator at every size, in a fixed order."""
    yield from _products()
    yield from _attention()
    yield from _convolutions()
    yield from _lookups()
    yield from _updates()
    for name, (operator, arguments) in MEMORY_OPERATORS.items():
        for elements in ELEMENTS:
            given = arguments(elements)
            yield Sample(name=name, work=_moved(given, operator(*given)), call=partial(operator, *given))


def _products() -> Iterator[Sample]:
    for m, k, n in MATMUL_SHAPES:
        a, b = torch.randn(m, k), torch.randn(k, n)
        yield Sample(name="mm", work=2.0 * m * k * n, call=partial(aten.mm.default, a, b))
        batch = (torch.randn(4, m, k), torch.randn(4, k, n))
        yield Sample(name="bmm", work=8.0 * m * k * n, call=partial(aten.bmm.default, *batch))


def _attention() -> Iterator[Sample]:
    """FLOPs as the rules count them: no causal mask is taken off."""
    attention, backward = torch.ops.autopar.attention.default, torch.ops.autopar.attention_backward.default
    for batch, heads, sequence, width in ATTENTION_SHAPES:
        query, key, value = (torch.randn(batch, heads, sequence, width) for _ in range(3))
        scores = 2.0 * batch * heads * sequence * sequence * width
        out, logsumexp = attention(query, key, value, None, 0.0, True, None, 0)
        forward = partial(attention, query, key, value, None, 0.0, True, None, 0)
        yield Sample(name="attention", work=2 * scores, call=forward)
        back = partial(backward, out, query, key, value, None, out, logsumexp, 0.0, True, None, 0)
        yield Sample(name="attention_backward", work=5 * scores, call=back)


def _convolutions() -> Iterator[Sample]:
    options: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for batch, channels_in, channels_out, size in CONVOLUTION_SHAPES:
        x, weight = torch.randn(batch, channels_in, size, size), torch.randn(channels_out, channels_in, 3, 3)
        out = aten.convolution.default(x, weight, None, *options)
        flops = 2.0 * batch * channels_in * channels_out * 9 * size * size
        yield Sample(name="convolution", work=flops, call=partial(aten.convolution.default, x, weight, None, *options))
        back = partial(aten.convolution_backward.default, out, x, weight, [0], *options, [True, True, False])
        yield Sample(name="convolution_backward", work=2 * flops, call=back)


def _lookups() -> Iterator[Sample]:
    """Of its table a lookup reads what it returns; its backward writes the whole table."""
    for elements in ELEMENTS:
        rows = elements // ROWS
        table, index = torch.randn(4 * rows, ROWS), torch.randint(0, 4 * rows, (rows,))
        found = aten.embedding.default(table, index)
        read = 2.0 * _moved((found,), ()) + _moved((index,), ())
        yield Sample(name="embedding", work=read, call=partial(aten.embedding.default, table, index))
        back = partial(aten.embedding_dense_backward.default, found, index, 4 * rows, -1, False)
        yield Sample(name="embedding_dense_backward", work=_moved((found, index), back()), call=back)


def _updates() -> Iterator[Sample]:
    """AdamW on one parameter as `ParallelModule` holds it, a DTensor: its dispatch costs more than a small update."""
    mesh = lone_device_mesh("cpu", ("alone",))
    for elements in ELEMENTS:
        block = torch.randn(elements // ROWS, ROWS)
        parameter = torch.nn.Parameter(DTensor.from_local(block, mesh, [Replicate()], run_check=False))
        parameter.grad = DTensor.from_local(torch.randn_like(block), mesh, [Replicate()], run_check=False)
        optimizer = torch.optim.AdamW([parameter])
        yield Sample(name=OPTIMIZER, work=float(ADAMW_TRAFFIC_BYTES * elements), call=optimizer.step)
