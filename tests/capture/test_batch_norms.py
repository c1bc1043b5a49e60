"""Every variant of torch's batch norm becomes the one spelling that has a rule, with torch's values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.rules.engine import uncovered
from tests.capture.execute import eager_step, outputs_of, run_program, worst_gradient_error

aten = torch.ops.aten
ONE_SPELLING = {
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten.native_batch_norm_backward.default",
}


class Norm(nn.Module):
    """forward(x (B, 4, H, W)) -> loss of a batch norm called by its operator."""

    def __init__(self, call: Callable[..., tuple[Tensor, ...]], has_statistics: bool, *options: bool) -> None:
        super().__init__()
        self.channels = nn.Conv2d(3, 4, 1)
        self.weight, self.bias = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("var", torch.rand(4) + 0.5)
        self.name, self.has_statistics, self.options = str(call), has_statistics, options

    def forward(self, x: Tensor) -> Tensor:
        operator = getattr(aten, self.name.split(".")[1])
        call = getattr(operator, self.name.split(".")[2])
        statistics = (self.mean, self.var) if self.has_statistics else ()
        out = call(self.channels(x), self.weight, self.bias, *statistics, *self.options, 0.1, 1e-5)[0]
        return out.pow(3).sum()


VARIANTS = {
    "native_training": (aten.native_batch_norm.default, True, True),
    "native_evaluation": (aten.native_batch_norm.default, True, False),
    "legit_training": (aten._native_batch_norm_legit.default, True, True),
    "legit_evaluation": (aten._native_batch_norm_legit.default, True, False),
    "no_statistics": (aten._native_batch_norm_legit.no_stats, False, True),
    "no_training": (aten._native_batch_norm_legit_no_training.default, True),
    "no_update": (aten._batch_norm_no_update.default, True),
    "with_update": (aten._batch_norm_with_update.default, True),
    "with_update_functional": (aten._batch_norm_with_update_functional.default, True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_the_one_spelling_and_trains_like_torchs(variant: str) -> None:
    torch.manual_seed(0)
    model, x = Norm(*VARIANTS[variant]), torch.randn(6, 3, 5, 2)
    program = capture(model, (x,), {})
    assert not uncovered(program)
    assert {str(n.target) for n in program.graph.nodes if "batch_norm" in str(n.target)} <= ONE_SPELLING
    loss, gradients, buffers = eager_step(model, (x,), {})
    with torch.no_grad():  # as in a backward pass
        values = run_program(program, model, (x,), {})
    (found,) = (outputs_of(program, values, "loss") or outputs_of(program, values, "output")).values()
    torch.testing.assert_close(found, loss)
    assert worst_gradient_error(outputs_of(program, values, "gradient"), gradients) < 1e-5
    for name, value in outputs_of(program, values, "mutation").items():
        torch.testing.assert_close(value, buffers[name])


def test_cudnns_kernel_is_opened_where_it_trains() -> None:
    model = Norm(aten.cudnn_batch_norm.default, True, True)
    program = capture(model, (torch.randn(6, 3, 5, 2),), {})
    assert not uncovered(program)
    assert {str(n.target) for n in program.graph.nodes if "batch_norm" in str(n.target)} <= ONE_SPELLING
    assert {o.name for o in program.outputs if o.role == "mutation"} == {"mean", "var"}
