"""Every random operator of torch, spelled with the few of ours that draw by global element index.

    bernoulli(p)    -->   uniform(p.shape, salt 3) < p
    randn([8, 6])   -->   normal([8, 6], salt 4)

The functions stand in the decomposition table of the trace, so they see what torch's own formulas (alpha dropout,
channel dropout, Gumbel softmax, stochastic depth) leave at the bottom. Each call site gets its own salt. What still
draws afterwards would draw differently on every rank, so `refuse_other_draws` stops the capture.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar._compat import OpOverload
from autopar.capture.checkpointed_regions import Salts
from autopar.errors import CaptureError
from autopar.ops.random import SITE_BIT
from autopar.passes.arguments import argument
from autopar.rules.call import argument_slot

aten = torch.ops.aten
ours = torch.ops.autopar


def random_decompositions(salts: Salts) -> dict[OpOverload, Callable[..., Any]]:
    """Operator -> the function that spells it out, with salts from `salts`."""

    def bound(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
            if generator is not None:
                raise CaptureError(
                    f"{function.__name__.strip('_')} draws from a torch.Generator of its own, which ranks cannot "
                    "share: leave `generator` out; the compiled model draws from torch.manual_seed's"
                )
            return function(salts, *args, **kwargs)

        return call

    return {operator: bound(function) for operator, function in DRAWS.items()}


def refuse_other_draws(graph_module: GraphModule) -> None:
    """Raises CaptureError for operators of the graph that draw and have no spelling by global index."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and _draws(node):
            modules = list(node.meta.get("nn_module_stack", {}).values())
            where = f" in {modules[-1][0]}" if modules else ""
            raise CaptureError(
                f"{node.target}{where} draws random numbers in a way that would differ from rank to rank; draw with "
                "torch.rand, randn or another of torch's distributions, or draw before the model and pass the values"
            )


def _draws(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    names = {entry.name for entry in schema.arguments}
    if "dropout_p" in names:
        position, default = argument_slot(node.target, "dropout_p")
        return bool(schema.name.startswith("aten::") and argument(node, position, "dropout_p", default) > 0.0)
    tags = getattr(node.target, "tags", ())
    return "generator" in names or torch.Tag.nondeterministic_seeded in tags


def _uniform(salts: Salts, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    drawn: Tensor = ours.uniform(like.shape, dtype or like.dtype, salts.take())
    return drawn


def _normal(salts: Salts, like: Tensor) -> Tensor:
    drawn: Tensor = ours.normal(like.shape, like.dtype, salts.take())
    return drawn


def _rand(salts: Salts, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    drawn: Tensor = ours.uniform(size, dtype or torch.get_default_dtype(), salts.take())
    return drawn


def _randn(salts: Salts, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    drawn: Tensor = ours.normal(size, dtype or torch.get_default_dtype(), salts.take())
    return drawn


def _rand_like(salts: Salts, like: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _rand(salts, like.shape, dtype=dtype or like.dtype)


def _randn_like(salts: Salts, like: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _randn(salts, like.shape, dtype=dtype or like.dtype)


def _randint_between(
    salts: Salts, low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    drawn: Tensor = ours.integers(size, low, high, dtype or torch.int64, salts.take())
    return drawn


def _randint(salts: Salts, high: int, size: Sequence[int], **options: Any) -> Tensor:
    return _randint_between(salts, 0, high, size, **options)


def _randint_like_between(
    salts: Salts, like: Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return _randint_between(salts, low, high, like.shape, dtype=dtype or like.dtype)


def _randint_like(salts: Salts, like: Tensor, high: int, **options: Any) -> Tensor:
    return _randint_like_between(salts, like, 0, high, **options)


def _random_to(salts: Salts, like: Tensor, to: int) -> Tensor:
    return _randint_like_between(salts, like, 0, to)


def _randperm(salts: Salts, n: int, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    _, order = aten.sort.default(ours.uniform([n], torch.float64, salts.take()))
    permutation: Tensor = order
    return permutation.to(dtype or torch.int64)


def _bernoulli(salts: Salts, p: Tensor) -> Tensor:
    return (_uniform(salts, p, torch.float32) < p).to(p.dtype)


def _bernoulli_of(salts: Salts, like: Tensor, p: Tensor | float = 0.5) -> Tensor:
    return (_uniform(salts, like, torch.float32) < p).to(like.dtype)


def _uniform_between(salts: Salts, like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return _uniform(salts, like) * (high - low) + low


def _normal_of(salts: Salts, like: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _normal(salts, like) * std + mean


def _normal_sized(salts: Salts, mean: float, std: float, size: Sequence[int], **options: Any) -> Tensor:
    return _randn(salts, size, **options) * std + mean


def _normal_around(salts: Salts, mean: Tensor, std: float = 1.0) -> Tensor:
    return _normal(salts, mean) * std + mean


def _normal_wide(salts: Salts, mean: float, std: Tensor) -> Tensor:
    return _normal(salts, std) * std + mean


def _normal_of_tensors(salts: Salts, mean: Tensor, std: Tensor) -> Tensor:
    return _normal(salts, mean + std) * std + mean


def _exponential(salts: Salts, like: Tensor, rate: float = 1.0) -> Tensor:
    drawn: Tensor = ours.exponential(like.shape, like.dtype, salts.take())
    return drawn / rate


def _log_normal(salts: Salts, like: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return (_normal(salts, like) * std + mean).exp()


def _geometric(salts: Salts, like: Tensor, p: float) -> Tensor:
    drawn: Tensor = ours.exponential(like.shape, torch.float32, salts.take())
    return (drawn / -math.log1p(-p)).ceil().to(like.dtype)


def _cauchy(salts: Salts, like: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return ((_uniform(salts, like) - 0.5) * math.pi).tan() * sigma + median


def _multinomial(salts: Salts, weights: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """The largest weights over exponential times are a draw without replacement; with it, positions in the sums."""
    if replacement and num_samples > 1:
        sums = weights.cumsum(-1)
        drawn = ours.uniform([*weights.shape[:-1], num_samples], weights.dtype, salts.take()) * sums[..., -1:]
        found: Tensor = aten.searchsorted.Tensor(sums, drawn, right=True)
        return found
    times = ours.exponential(weights.shape, weights.dtype, salts.take())
    _, chosen = aten.topk.default(weights / times, num_samples)
    positions: Tensor = chosen
    return positions


def _native_dropout(salts: Salts, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if train is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    out, mask = ours.dropout(x, p, salts.take() | SITE_BIT)
    return out, mask


def _rrelu(
    salts: Salts, x: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False
) -> tuple[Tensor, Tensor]:
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2)), noise.clone()
    slopes = torch.where(x > 0, 1.0, _uniform_between(salts, x, lower, upper))
    return x * slopes, slopes


def _rrelu_backward(
    salts: Salts, grad: Tensor, x: Tensor, noise: Tensor, lower: float, upper: float, training: bool, _: bool
) -> Tensor:
    return grad * noise if training else torch.where(x > 0, grad, grad * ((lower + upper) / 2))


DRAWS: dict[OpOverload, Callable[..., Any]] = {
    aten.rand.default: _rand,
    aten.rand.generator: _rand,
    aten.randn.default: _randn,
    aten.randn.generator: _randn,
    aten.rand_like.default: _rand_like,
    aten.randn_like.default: _randn_like,
    aten.randint.default: _randint,
    aten.randint.generator: _randint,
    aten.randint.low: _randint_between,
    aten.randint.low_generator: _randint_between,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_between,
    aten.random.to: _random_to,
    getattr(aten.random, "from"): _randint_like_between,
    aten.randperm.default: _randperm,
    aten.randperm.generator: _randperm,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_of,
    aten.bernoulli.Tensor: _bernoulli_of,
    aten.uniform.default: _uniform_between,
    aten.normal_functional.default: _normal_of,
    aten.normal.float_float: _normal_sized,
    aten.normal.Tensor_float: _normal_around,
    aten.normal.float_Tensor: _normal_wide,
    aten.normal.Tensor_Tensor: _normal_of_tensors,
    aten.exponential.default: _exponential,
    aten.log_normal.default: _log_normal,
    aten.geometric.default: _geometric,
    aten.cauchy.default: _cauchy,
    aten.multinomial.default: _multinomial,
    aten.native_dropout.default: _native_dropout,
    aten.rrelu_with_noise_functional.default: _rrelu,
    aten.rrelu_with_noise_backward.default: _rrelu_backward,
}
