"""Random operators draw by global element index, so that N processes draw what one process draws."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.ops.dropout import dropout_by_index
from autopar.passes.local_context import LocalContext


def _dropout(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    x, p, salt = args
    assert context.seed is not None, f"{context.node}: dropout needs a seed"
    shape = tuple(context.global_output().shape)
    return context.call(dropout_by_index, x, p, context.seed, salt, context.output_runs(), shape)


REWRITES = {"autopar.dropout.default": _dropout}
