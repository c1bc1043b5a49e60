"""Products with a block of the experts: `autopar.ops.experts` with the first expert of this rank's block."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.ops import experts
from autopar.passes.implementations.local_context import LocalContext


def _expert_linear(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    num_experts = int(context.global_argument("weight").meta["val"].shape[0])
    start = context.input_start(1, 0, num_experts)
    return _of_all(num_experts, context.call(experts.block_expert_linear, *args, start, **kwargs))


def _expert_outer(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    num_experts, start = context.output_shape()[0], context.output_start(0, 0)
    call = context.call(experts.block_expert_outer, *args[:3], num_experts, args[4], start)
    return _of_all(context.node.meta["val"].shape[0], call)


def _of_all(num_experts: int, call: fx.Node) -> fx.Node:
    """The call, which says among how many experts its rows are dealt out: those of other blocks are no work."""
    call.meta["num_experts"] = num_experts
    return call


IMPLEMENTATIONS = {
    "masked_experts": _expert_linear,
    "masked_experts_outer": _expert_outer,
}
