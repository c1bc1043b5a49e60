"""Attention over local blocks: where it draws, or a cut sequence hides pairs, a rank needs global indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from autopar.layouts.placement import local_runs
from autopar.ops.attention_operator import (
    attention_backward_by_index,
    attention_backward_with_mask_by_index,
    attention_by_index,
)
from autopar.passes.implementations.local_context import LocalContext
from autopar.rules.call import argument_slot

_BY_INDEX: Mapping[str, Callable[..., Any]] = {
    "autopar.attention.default": attention_by_index,
    "autopar.attention_backward.default": attention_backward_by_index,
    "autopar.attention_backward_with_mask.default": attention_backward_with_mask_by_index,
    "autopar.ring_attention.default": attention_by_index,
    "autopar.ring_attention_backward.default": attention_backward_by_index,
}


def _attention_by_index(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    function = _BY_INDEX[str(context.node.target)]
    query_at = 0 if function is attention_by_index else 1
    shape = _scores_shape(context)
    layout = context.plan.inputs[query_at]
    runs = tuple(local_runs(size, layout, dim, context.mesh, context.coordinate) for dim, size in enumerate(shape[:-1]))
    seed = context.seed if context.global_argument("dropout_p") > 0.0 else None
    window, position = context.global_argument("window"), argument_slot(context.node.target, "window")[0]
    options = {} if window is None else {"window": window}
    return context.call(function, *args[:position], seed, (*runs, ((0, shape[-1]),)), shape, **options)


def _scores_shape(context: LocalContext) -> tuple[int, ...]:
    """Global (..., H, S, T) of the scores."""
    query, key = (context.global_argument(name).meta["val"].shape for name in ("query", "key"))
    return (*query[:-1], key[-2])


def _attention(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The operator itself unless it draws, or is many blocks of a window."""
    if context.global_argument("dropout_p") > 0.0 or context.global_argument("window") is not None:
        return _attention_by_index(context, args, kwargs)
    return context.call_operator(args, kwargs)


IMPLEMENTATIONS = {"attention_by_index": _attention_by_index}
REWRITES = dict.fromkeys(_BY_INDEX, _attention)
