"""The operators that a profile measures: what a training step spends its time on, at sizes from cache to memory.

    for turn in rounds():              # 2**8 elements: "mm", "attention", ..., "add", "tanh", ...; then 2**13, ...
        for sample in turn: seconds[sample].append(time(sample.call))                # several times round

A product is measured by its FLOPs (`product_census.py`), any other operator by the bytes that it reads and writes,
counted as the prices of the planner count them (`planner/problem/prices.py`), so that a curve through the samples
answers what the planner asks.

Between two calls of an operator a step runs the others. So operators of like sizes take turns: each finds in the caches
what so much other code and so many other operands have left there. In a step of a small Llama, four processes on two
Intel cores, an addition of 3 KB takes 14 us of the processor, in its turn 13, and behind caches that were emptied 76;
one of 768 KB 86, 95 and 225.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar._compat import lone_device_mesh
from autopar.cost_models.operator_costs import OPTIMIZER, SGD
from autopar.runtime.calibration.product_census import NUM_PRODUCTS, Sample, products

aten = torch.ops.aten

def _moved(arguments: Sequence[Any], results: Any) -> int:
    """Bytes of all tensors among arguments and results."""
    found = [*arguments, *(results if isinstance(results, tuple | list) else (results,))]
    return sum(value.numel() * value.element_size() for value in found if isinstance(value, Tensor))


UPDATES: Mapping[str, tuple[type[torch.optim.Optimizer], int]] = {
    OPTIMIZER: (torch.optim.AdamW, 28),
    SGD: (torch.optim.SGD, 12),
}
"""Curve -> optimizer and its traffic in bytes per float32 element, as the planner counts: parameter, gradient and the
new parameter, and moments in and out."""
ROWS = 256
"""Elements of the last dim of operators that work on rows."""
IMAGE_ROWS = 16
"""Height and width of the images of norms and pooling: a batch of one or more, 32 channels where there are so many."""

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


def _image(elements: int) -> Tensor:
    images = elements // IMAGE_ROWS**2
    channels = min(32, images)
    return torch.rand(images // channels, channels, IMAGE_ROWS, IMAGE_ROWS)


def _batch_norm(elements: int) -> tuple[Any, ...]:
    x = _image(elements)
    ones, zeros = torch.ones(x.shape[1]), torch.zeros(x.shape[1])
    return (x, ones, zeros, zeros.clone(), ones.clone(), True, 0.1, 1e-5)


def _batch_norm_backward(elements: int) -> tuple[Any, ...]:
    x = _image(elements)
    ones, zeros = torch.ones(x.shape[1]), torch.zeros(x.shape[1])
    return (x, x.clone(), ones, zeros, ones, zeros, ones, True, 1e-5, [True, True, True])


def _group_norm(elements: int) -> tuple[Any, ...]:
    x = _image(elements)
    channels = x.shape[1]
    shape = (x.shape[0], channels, IMAGE_ROWS**2, max(1, channels // 4))
    return (x, torch.ones(channels), torch.zeros(channels), *shape, 1e-5)


def _group_norm_backward(elements: int) -> tuple[Any, ...]:
    x, weight, _, *shape, _ = _group_norm(elements)
    mean = torch.zeros(shape[0], shape[-1])
    return (x, x.clone(), mean, mean + 1, weight, *shape, [True, True, True])


def _pool(elements: int) -> tuple[Any, ...]:
    return (_image(elements), [2, 2], [2, 2])


def _pool_backward(elements: int) -> tuple[Any, ...]:
    x = _image(elements)
    out, indices = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    return (out, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)


MEMORY_OPERATORS: dict[str, tuple[Callable[..., Any], Maker]] = {
    "add": (aten.add.Tensor, _two),
    "sub": (aten.sub.Tensor, _two),
    "mul": (aten.mul.Tensor, _two),
    "div": (aten.div.Tensor, _two),
    "neg": (aten.neg.default, _one),
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
    "full": (aten.full.default, lambda elements: ([elements // ROWS, ROWS], 1.0)),
    "sum": (lambda x: aten.sum.dim_IntList(x, [0]), _one),
    "mean": (lambda x: aten.mean.dim(x, [-1], True), _one),
    "amax": (lambda x: aten.amax.default(x, [-1], True), _one),
    "var_mean": (lambda x: aten.var_mean.correction(x, [-1], correction=0, keepdim=True), _one),
    "cumsum": (lambda x: aten.cumsum.default(x, 0), _one),
    "cat": (lambda x, y: aten.cat.default([x, y], -1), _two),
    "native_layer_norm": (aten.native_layer_norm.default, _norm),
    "native_layer_norm_backward": (aten.native_layer_norm_backward.default, _norm_backward),
    "_native_batch_norm_legit_functional": (aten._native_batch_norm_legit_functional.default, _batch_norm),
    "native_batch_norm_backward": (aten.native_batch_norm_backward.default, _batch_norm_backward),
    "native_group_norm": (aten.native_group_norm.default, _group_norm),
    "native_group_norm_backward": (aten.native_group_norm_backward.default, _group_norm_backward),
    "max_pool2d_with_indices": (aten.max_pool2d_with_indices.default, _pool),
    "max_pool2d_with_indices_backward": (aten.max_pool2d_with_indices_backward.default, _pool_backward),
    "_softmax": (lambda x: aten._softmax.default(x, -1, False), _one),
    "_softmax_backward_data": (lambda x, y: aten._softmax_backward_data(x, y, -1, torch.float32), _two),
    "_log_softmax": (lambda x: aten._log_softmax.default(x, -1, False), _one),
    "_log_softmax_backward_data": (lambda x, y: aten._log_softmax_backward_data(x, y, -1, torch.float32), _two),
    "dropout": (lambda x: torch.ops.autopar.dropout.default(x, 0.1, 0), _one),
}
"""Bare name -> (call, arguments for a number of elements)."""

ELEMENTS = (1 << 8, 1 << 13, 1 << 16, 1 << 18, 1 << 21)
"""1 KB to 8 MB of float32: nothing but overhead, in the first cache, in the second, in memory."""
UPDATED_PARAMETERS, UPDATED_ELEMENTS = 16, 1 << 23
"""Parameters of one measured step, and their elements: the most of both."""

LARGE_AT_ONCE = 8
"""Samples of the largest size that take turns: their operands are far beyond the caches, and lie in memory together."""

NUM_SAMPLES = NUM_PRODUCTS + (len(MEMORY_OPERATORS) + 2 + len(UPDATES)) * len(ELEMENTS)


def rounds() -> Iterator[list[Sample]]:
    """Every operator at every size, in a fixed order: those that take turns, small ones first. Updates of parameters
    have turns of their own, as they have the end of a step."""
    by_size = _by_size(products())
    for elements, of_flops in zip(ELEMENTS, by_size, strict=True):
        found = itertools.chain(of_flops, _lookups(elements), _others(elements))
        at_once = LARGE_AT_ONCE if elements == ELEMENTS[-1] else None
        while turn := list(itertools.islice(found, at_once)):
            yield turn
        yield list(_updates(elements))


def _by_size(found: Iterable[Sample]) -> list[list[Sample]]:
    """As many parts as there are `ELEMENTS`, each with its share of every operator's samples, small ones first."""
    named: dict[str, list[Sample]] = {}
    for sample in found:
        named.setdefault(sample.name, []).append(sample)
    parts: list[list[Sample]] = [[] for _ in ELEMENTS]
    for same in named.values():
        for place, sample in enumerate(sorted(same, key=lambda sample: sample.work)):
            parts[place * len(parts) // len(same)].append(sample)
    return parts


def _others(elements: int) -> Iterator[Sample]:
    for name, (operator, arguments) in MEMORY_OPERATORS.items():
        given = arguments(elements)
        yield Sample(name=name, work=_moved(given, operator(*given)), call=partial(operator, *given))


def _lookups(elements: int) -> Iterator[Sample]:
    """Of its table a lookup reads what it returns; its backward writes the whole table."""
    rows = elements // ROWS
    table, index = torch.randn(4 * rows, ROWS), torch.randint(0, 4 * rows, (rows,))
    found = aten.embedding.default(table, index)
    read = 2.0 * _moved((found,), ()) + _moved((index,), ())
    yield Sample(name="embedding", work=read, call=partial(aten.embedding.default, table, index))
    back = partial(aten.embedding_dense_backward.default, found, index, 4 * rows, -1, False)
    yield Sample(name="embedding_dense_backward", work=_moved((found, index), back()), call=back)


class _Gradients(torch.autograd.Function):
    """Hands every parameter a gradient, as the backward function of an emitted step does."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, gradients: list[Tensor], *parameters: DTensor) -> Tensor:
        ctx.mesh, ctx.gradients = mesh, gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Any, ...]:
        return (None, None, *(_replicated(gradient, ctx.mesh) for gradient in ctx.gradients))


def _replicated(block: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(block, mesh, [Replicate()], run_check=False, shape=block.shape, stride=block.stride())


def _updates(elements: int) -> Iterator[Sample]:
    """What a parameter costs beside its operators: a gradient wrapped and accumulated, the step, the gradient dropped.

    The parameters are DTensors as `ParallelModule` holds them, whose dispatch costs more than a small update.
    """
    mesh, count = lone_device_mesh("cpu", ("alone",)), min(UPDATED_PARAMETERS, UPDATED_ELEMENTS // elements)
    for name, (optimizer, traffic) in UPDATES.items():
        blocks = [torch.randn(elements // ROWS, ROWS) for _ in range(count)]
        parameters = [torch.nn.Parameter(_replicated(block, mesh)) for block in blocks]
        call = partial(_update, mesh, blocks, parameters, optimizer(parameters, lr=1e-3))  # type: ignore[call-arg]
        yield Sample(name=name, work=float(traffic * elements), call=call, calls=count)


def _update(mesh: DeviceMesh, blocks: list[Tensor], parameters: list[Any], optimizer: torch.optim.Optimizer) -> None:
    _Gradients.apply(mesh, blocks, *parameters).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
