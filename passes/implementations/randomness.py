"""Random operators draw by global element index, so that N processes draw what one process draws.

Attention needs the same global view for a causal mask over a split query sequence.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.layout import local_runs
from autopar.ops.attention import attention_backward_by_index, attention_by_index
from autopar.ops.dropout import dropout_by_index
from autopar.passes.local_context import LocalContext


def _dropout(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    x, p, salt = args
    assert context.seed is not None, f"{context.node}: dropout needs a seed"
    shape = tuple(context.global_output().shape)
    return context.call(dropout_by_index, x, p, context.seed, salt, context.output_runs(), shape)


def _attention_by_index(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    is_backward = "backward" in str(context.node.target)
    function = attention_backward_by_index if is_backward else attention_by_index
    query_at = 1 if is_backward else 0
    shape = _scores_shape(context)
    layout = context.plan.inputs[query_at]
    runs = tuple(local_runs(size, layout, dim, context.mesh, context.coordinate) for dim, size in enumerate(shape[:3]))
    seed = context.seed if context.global_argument("dropout_p") > 0.0 else None
    return context.call(function, *args, seed, (*runs, ((0, shape[3]),)), shape)


def _scores_shape(context: LocalContext) -> tuple[int, ...]:
    """Global (B, H, S, T) of the scores."""
    query, key = (context.global_argument(name).meta["val"].shape for name in ("query", "key"))
    return (*query[:3], key[2])


def _attention(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The operator itself unless it draws."""
    if context.global_argument("dropout_p") > 0.0:
        return _attention_by_index(context, args, kwargs)
    return context.call_operator(args, kwargs)


IMPLEMENTATIONS = {"attention_by_index": _attention_by_index}
REWRITES = {
    "autopar.dropout.default": _dropout,
    "autopar.attention.default": _attention,
    "autopar.attention_backward.default": _attention,
}
