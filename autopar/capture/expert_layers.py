"""While a model is traced, its mixtures of experts become products with one matrix per row (`autopar.ops.experts`).

    every (token, chosen expert) pair is a row:   rows = tokens repeated k times, ids = chosen experts, flat
    expert_linear(rows, gate_up, ids) -> gate -> expert_linear(rows, down, ids) -> times routing weight -> sum over k

Nothing is sorted globally and nothing is dropped: shapes are static, and every dim can be split. Layers of
transformers that dispatch through its experts interface get this form whatever implementation their configuration
names; loops that models write out themselves are read by `expert_loops.py`. transformers is not imported: a model
made of it has done so.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

_INTERFACE = "transformers.integrations.moe"


@contextlib.contextmanager
def adapted_experts() -> Iterator[None]:
    """Within the context, expert layers of transformers run `experts_forward`; then all is restored."""
    with contextlib.ExitStack() as stack:
        interface = getattr(sys.modules.get(_INTERFACE), "ExpertsInterface", None)
        if interface is not None:
            stack.enter_context(mock.patch.object(interface, "get_interface", _chosen_forward))
        yield


def _chosen_forward(interface: object, name: str | None, default: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return experts_forward


def experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any, **__: Any
) -> Tensor:
    """The forward of an expert layer of transformers: (T, D), (T, k), (T, k) -> (T, D).

    experts: a module of the experts interface, whose flags say how its weights are stored (has_gate, has_bias,
    is_transposed, has_post_expert_norm) and which applies its own gate.
    """
    num_tokens, num_chosen = top_k_index.shape
    expert_ids = top_k_index.reshape(-1)
    rows = hidden_states.unsqueeze(1).expand(-1, num_chosen, -1).reshape(num_tokens * num_chosen, -1)
    if experts.has_gate:
        rows = experts._apply_gate(_product(experts, "gate_up_proj", rows, expert_ids))
    else:
        rows = experts.act_fn(_product(experts, "up_proj", rows, expert_ids))
    rows = _product(experts, "down_proj", rows, expert_ids)
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    weighted = rows * top_k_weights.reshape(-1, 1)
    return weighted.view(num_tokens, num_chosen, -1).sum(dim=1).to(hidden_states.dtype)


def _product(experts: Any, name: str, rows: Tensor, expert_ids: Tensor) -> Tensor:
    weight = getattr(experts, name)
    out: Tensor = torch.ops.autopar.expert_linear(rows.to(weight.dtype), weight, expert_ids, not experts.is_transposed)
    return out + functional.embedding(expert_ids, getattr(experts, f"{name}_bias")) if experts.has_bias else out
