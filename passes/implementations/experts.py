"""Products with a block of the experts: `autopar.ops.experts` with the first expert of this rank's block."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.ops import experts
from autopar.passes.local_context import LocalContext


def _expert_linear(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    num_experts = int(context.global_argument("weight").meta["val"].shape[0])
    start = context.input_start(1, 0, num_experts)
    return context.call(experts.block_expert_linear, *args, start, **kwargs)


def _expert_outer(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    num_experts, start = context.output_shape()[0], context.output_start(0, 0)
    return context.call(experts.block_expert_outer, *args[:3], num_experts, args[4], start)


IMPLEMENTATIONS = {
    "masked_experts": _expert_linear,
    "masked_experts_outer": _expert_outer,
}
