"""Local calls: how one operator runs on the blocks that a rank holds.

    full([8, 4], 1.0), dim 0 split in 2           -->  full([4, 4], 1.0)
    embedding(w, ids), vocabulary split           -->  masked_embedding(w, ids, start=2)
    mm(a, b), any split                           -->  mm(a, b)

A name of the rule that needs an implementation picks it from `IMPLEMENTATIONS`; operators with sizes among their
arguments, and random ones, are rewritten by `REWRITES`; every other operator is called as it is. Raw kernels that read
their operands as if these were contiguous get contiguous ones: where torch checks, a strided block is an error, where
it does not (group norm), the values are wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.implementations import IMPLEMENTATIONS, REWRITES
from autopar.passes.implementations.local_context import LocalContext
from autopar.rules.alternatives import rule_as, target_as

contiguous = torch.ops.aten.contiguous.default

__all__ = ["LocalContext", "emit_local_call"]

CONTIGUOUS_OPERANDS = frozenset(
    {
        "aten.native_group_norm",
        "aten.native_group_norm_backward",
        "aten._pdist_forward",
        "aten._pdist_backward",
        "aten._weight_norm_interface",
        "aten._weight_norm_interface_backward",
    }
)
"""Raw kernels, found by fuzzing, that do not take strides into account."""


def emit_local_call(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Append the local form of `context.node` and return its node.

    args, kwargs: those of the node, with tensor nodes replaced by local nodes. An operator with several outputs gives
    a node whose value is a tuple, as the operator does.
    """
    if str(context.node.target).rpartition(".")[0] in CONTIGUOUS_OPERANDS:
        args, kwargs = fx.node.map_arg((args, kwargs), lambda x: context.call(contiguous, x))
    implementation = _needed_implementation(context)
    if implementation is not None:
        return IMPLEMENTATIONS[implementation](context, args, kwargs)
    rewrite = REWRITES.get(str(target_as(context.node, context.plan.implementation)))
    if rewrite is not None:
        return rewrite(context, args, kwargs)
    return context.call_operator(args, kwargs)


def _needed_implementation(context: LocalContext) -> str | None:
    """The implementation that the split names ask for; that of a pair sees to its names alone, too."""
    split = [name for name in context.plan.axes if name is not None]
    rule = rule_as(context.node, context.plan.implementation) if split else None
    if rule is None:
        return None
    pairs = [name for name in split if name in rule.pairs]
    needed = {rule.implementations[name] for name in pairs or split if name in rule.implementations}
    assert len(needed) <= 1, f"{context.node}: {split} need several implementations: {sorted(needed)}"
    return next(iter(needed), None)
