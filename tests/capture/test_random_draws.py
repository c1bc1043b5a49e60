"""Every random operator of torch becomes draws by global element index, each call site with its own salt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.trace import capture
from autopar.errors import CaptureError
from autopar.passes.random_operators import is_random
from autopar.program import Program
from autopar.rules.engine import uncovered
from tests.capture.execute import outputs_of, run_program
from tests.capture.random_models import DRAWS, Draw, Drawing


def captured(draw: Draw) -> tuple[Program, Drawing, Tensor]:
    torch.manual_seed(0)
    model, x = Drawing(draw), torch.randn(4, 5, 6)
    return capture(model, (x,)), model, x


def gradients(draw: Draw) -> dict[str, Tensor]:
    program, model, x = captured(draw)
    return outputs_of(program, run_program(program, model, (x,), {}), "gradient")


@pytest.mark.exhaustive(every=6)
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_ours_and_covered(name: str) -> None:
    program, model, x = captured(DRAWS[name])
    assert any(is_random(node) for node in program.graph.nodes)
    assert uncovered(program) == {}
    first, second = (run_program(program, model, (x,), {}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(value.isfinite().all() for value in first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_region_draws_again_what_it_drew(reentrant: bool) -> None:
    expected = gradients(DRAWS["plain_blocks"])
    found = gradients(DRAWS["checkpoint_reentrant" if reentrant else "checkpoint"])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_call_sites_draw_apart() -> None:
    program, *_ = captured(
        lambda h: torch.rand_like(h) * h + torch.rand_like(h) + torch.native_dropout(h, 0.5, True)[0]
    )
    salts = {node.args[-1] for node in program.graph.nodes if is_random(node)}
    assert len(salts) == 3


def test_attention_of_every_kind_draws_where_it_drops() -> None:
    def call(name: str, dropout_p: float) -> torch.fx.Node:
        arguments = getattr(torch.ops.autopar, name).default._schema.arguments
        return torch.fx.Graph().call_function(
            getattr(torch.ops.autopar, name).default,
            tuple(dropout_p if argument.name == "dropout_p" else None for argument in arguments),
        )

    names = ["attention", "attention_backward", "attention_backward_with_mask", "ring_attention"]
    for name in [*names, "ring_attention_backward"]:
        assert is_random(call(name, 0.1)), name
        assert not is_random(call(name, 0.0)), name


def test_evaluation_draws_nothing() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.dropout(x, 0.5, self.training)
            return nn.functional.rrelu(nn.functional.alpha_dropout(x, 0.5, self.training), training=self.training).sum()

    program = capture(Dropping().eval(), (torch.randn(3, 4),))
    assert not any(is_random(node) for node in program.graph.nodes)


@pytest.mark.parametrize("draw", [lambda h: h * torch.poisson(h.exp()), lambda h: h * torch._standard_gamma(h.exp())])
def test_a_draw_without_a_spelling_is_refused(draw: Draw) -> None:
    with pytest.raises(CaptureError, match=r"(poisson|gamma).*rank"):
        captured(draw)


def test_a_generator_is_refused() -> None:
    with pytest.raises(CaptureError, match="Generator"):
        captured(lambda h: h * torch.rand(h.shape, generator=torch.Generator()))
