"""What a call binds and writes; `tests/distributed` has the values themselves, over several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConfigurationError
from autopar.runtime.step.call_values import graph_inputs, graph_states, write_buffers


class Counting(nn.Module):
    """Draws, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.count.add_(1.0)
        return {"drawn": nn.functional.dropout(self.linear(x), 0.5), "kind": "plain"}


@pytest.fixture(scope="module")
def module() -> autopar.ParallelModule:
    return autopar.compile(Counting(), torch.ones(2, 4), loss_fn=lambda output, batch: output["drawn"].mean())


def test_every_input_of_the_graph_has_a_value_in_order(module: autopar.ParallelModule) -> None:
    step, leaves = module.step_for((torch.ones(2, 4),), {})
    states = graph_states(module, step, seed=7)
    values = graph_inputs(step, leaves, states, ())
    bound = [value for value in step.lowered.inputs if value.role != "tangent"]
    assert {value.role for value in bound} == {"parameter", "buffer", "input", "seed"}
    assert [tuple(value.shape) for value in values] == [value.shape for value in bound]
    assert all(int(states[value.name]) == 7 for value in bound if value.role == "seed")


def test_a_buffer_takes_its_new_value_and_the_old_tensor_stays(module: autopar.ParallelModule) -> None:
    before = module.get_buffer("count").detach()
    earlier = float(before)
    module(torch.ones(2, 4))
    assert float(module.get_buffer("count")) == earlier + 1.0
    assert float(before) == earlier


def test_only_buffers_are_written() -> None:
    step: Any = SimpleNamespace(forward_outputs=[SimpleNamespace(role="mutation", name="weight")])
    with pytest.raises(ConfigurationError, match="the model changes weight in place; only buffers may be changed"):
        write_buffers(nn.Linear(1, 1), step, [torch.ones(1, 1)])
