"""Random operators draw by global element index, so that N processes draw what one process draws.

dropout(x, 0.1, salt 3)    -->   dropout_by_index(x_local, 0.1, seed, 3, runs of the block, global shape)
normal([8, 6], f32, 4)     -->   normal_by_index(f32, 4, seed, runs of the block, global shape)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from autopar.ops.dropout_operator import dropout_by_index
from autopar.ops.random import exponential_by_index, integers_by_index, normal_by_index, uniform_by_index
from autopar.passes.implementations.local_context import LocalContext


def _dropout(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    x, p, salt = args
    return context.call(dropout_by_index, x, p, _seed(context), salt, context.output_runs(), _shape(context))


def _factory(by_index: Callable[..., Any]) -> Callable[[LocalContext, tuple[Any, ...], dict[str, Any]], fx.Node]:
    """All arguments but the size, then the seed and where the block lies."""

    def emit(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        return context.call(by_index, *args[1:], _seed(context), context.output_runs(), _shape(context))

    return emit


def _seed(context: LocalContext) -> fx.Node:
    assert context.seed is not None, f"{context.node}: a random operator needs a seed"
    return context.seed


def _shape(context: LocalContext) -> tuple[int, ...]:
    return tuple(context.global_output().shape)


REWRITES = {
    "autopar.dropout.default": _dropout,
    "autopar.uniform.default": _factory(uniform_by_index),
    "autopar.normal.default": _factory(normal_by_index),
    "autopar.exponential.default": _factory(exponential_by_index),
    "autopar.integers.default": _factory(integers_by_index),
}
