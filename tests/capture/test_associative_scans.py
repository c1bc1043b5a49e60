"""`associative_scan` is captured as a linear recurrence or a running sum, with the gradients of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from transformers import MambaForCausalLM

from autopar.capture import associative_scans, capture
from autopar.program import Program
from benchmarks.zoo.transformers_tiny import tiny_config
from tests.capture.execute import eager_step, outputs_of, run_program, worst_gradient_error

Combine = Callable[[Any, Any], Any]
COMBINES: dict[str, Combine] = {
    "decay first": lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1]),
    "decay last": lambda left, right: (right[1] * left[0] + right[0], left[1] * right[1]),
    "something else": lambda left, right: (torch.maximum(left[0], right[0]), left[1] + right[1]),
}


class Scan(nn.Module):
    """Both results of a scan over places, weighted."""

    def __init__(self, combine: Combine, reverse: bool = False) -> None:
        super().__init__()
        self.combine, self.reverse = combine, reverse
        self.weights = nn.Parameter(torch.randn(2, 7, 3))

    def forward(self, x: Tensor) -> Tensor:
        pair = torch.sigmoid(x * self.weights[0]), x.sin() * self.weights[1]
        found = associative_scan(self.combine, pair, 1, self.reverse, combine_mode="generic")
        return (found[0].pow(2) + found[1].exp()).sum()


class Loop(nn.Module):
    """h = a h + b, step by step, with the weights of a `Scan`."""

    def __init__(self, weights: nn.Parameter) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        decay, added = torch.sigmoid(x * self.weights[0]), x.sin() * self.weights[1]
        product, state, total = torch.ones_like(x[:, 0]), torch.zeros_like(x[:, 0]), x.new_zeros(())
        for at in range(x.shape[1]):
            product, state = decay[:, at] * product, decay[:, at] * state + added[:, at]
            total = total + (product.pow(2) + state.exp()).sum()
        return total


def targets(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_a_scan_of_a_recurrence_trains_like_a_loop() -> None:
    model, x = Scan(COMBINES["decay first"]), torch.randn(2, 7, 3)
    program = capture(model, (x,))
    assert targets(program).count("autopar.linear_recurrence.default") == 2  # and one backward
    _, expected, _ = eager_step(Loop(model.weights), (x,), {})
    with torch.no_grad():
        values = run_program(program, model, (x,), {})
    assert worst_gradient_error(outputs_of(program, values, "gradient"), expected) < 1e-5


@pytest.mark.parametrize("name", COMBINES)
@pytest.mark.parametrize("reverse", [False, True])
def test_every_scan_equals_torchs(name: str, reverse: bool) -> None:
    model, x = Scan(COMBINES[name], reverse), torch.randn(2, 7, 3)
    program = capture(model, (x,))
    assert ("autopar.linear_recurrence.default" in targets(program)) == (name != "something else")
    loss, expected, _ = eager_step(model, (x,), {})
    with torch.no_grad():
        values = run_program(program, model, (x,), {})
    (found,) = outputs_of(program, values, "loss").values()
    torch.testing.assert_close(found, loss)
    assert worst_gradient_error(outputs_of(program, values, "gradient"), expected) < 1e-5


def test_the_selective_scan_of_mamba_is_one_operator_a_layer() -> None:
    model = MambaForCausalLM(tiny_config(MambaForCausalLM.config_class))
    ids = torch.randint(3, 96, (2, 16))
    program = capture(model, (), {"input_ids": ids, "labels": ids})
    assert targets(program).count("autopar.linear_recurrence.default") == 2 * model.config.num_hidden_layers


def test_a_function_with_a_limit_is_no_sum() -> None:
    leaves = [torch.ones(4)]
    assert associative_scans._known(lambda left, right: left + right, leaves, 0) is not None
    assert associative_scans._known(lambda left, right: (left + right).clamp(max=1e6), leaves, 0) is None
