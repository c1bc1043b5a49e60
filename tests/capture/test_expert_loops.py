"""Mixtures of experts, from transformers or written as loops, trace as one product per layer and compute the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.program import Program
from autopar.rules.engine import uncovered
from tests.capture.execute import eager_step, outputs_of, run_program, worst_gradient_error
from tests.capture.expert_models import LOOPS, NUM_CHOSEN, WIDTH, Mixture, mixture

PRODUCTS_OF_A_LAYER = 3  # gate, up, down; as many again backward


def num_products(program: Program) -> int:
    return len(program.graph.find_nodes(op="call_function", target=torch.ops.autopar.expert_linear.default))


def check(model: nn.Module, inputs: dict[str, Tensor], tolerance: float) -> Program:
    """Loss and gradients of the captured program equal the plain model's; every operator has a rule."""
    program = capture(model, (), inputs)
    assert not uncovered(program)
    values = run_program(program, model, (), inputs)
    loss, gradients, _ = eager_step(model, (), inputs)
    torch.testing.assert_close(outputs_of(program, values, "loss")["loss"], loss, rtol=tolerance, atol=0)
    assert worst_gradient_error(outputs_of(program, values, "gradient"), gradients) < tolerance
    return program


@pytest.mark.exhaustive(sample=["hits", "equal"])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_become_one_product_per_matrix(name: str) -> None:
    program = check(*mixture(name), tolerance=1e-12)
    assert num_products(program) == 2 * PRODUCTS_OF_A_LAYER


def test_a_wrong_expert_is_noticed() -> None:
    """The comparison proves itself: ids that are one too large give another loss."""
    model, inputs = mixture("one_hot")
    program = capture(model, (), inputs)
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.autopar.expert_linear.default):
        with program.graph.inserting_before(node):
            node.update_arg(2, program.graph.call_function(torch.ops.aten.add.Scalar, (node.args[2], 1)))
    program.graph_module.recompile()
    values = run_program(program, model, (), inputs)
    loss, _, _ = eager_step(model, (), inputs)
    assert not torch.isclose(outputs_of(program, values, "loss")["loss"], loss)


def test_a_loop_that_reads_its_sum_on_the_way_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def reading(model: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        flat, weights, chosen = x.view(-1, WIDTH), weights.view(-1, NUM_CHOSEN), chosen.view(-1, NUM_CHOSEN)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(model.experts):
            token, choice = torch.where(chosen == e)
            out.index_add_(0, token, expert(flat[token]) * weights[token, choice, None])
            out = out + 0
        return out.view_as(x)

    _, inputs = mixture("hits")
    check(Mixture(reading).double(), inputs, tolerance=1e-12)
    assert "reads what it adds up before it has ended" in caplog.text
    caplog.clear()
    check(*mixture("hits"), tolerance=1e-12)
    assert "reads what it adds up" not in caplog.text


def causal(config_class: type, model_class: type, **changes: object) -> nn.Module:
    config = config_class(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
        pad_token_id=0,
        experts_implementation="eager",
        **changes,
    )
    torch.manual_seed(0)
    return model_class(config).double().train()


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: causal(transformers.MixtralConfig, transformers.MixtralForCausalLM, num_local_experts=4),
    "gpt_oss": lambda: causal(
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        num_local_experts=4,
        head_dim=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"],
    ),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_expert_layers_of_transformers_become_two_products(name: str) -> None:
    model = CAUSAL[name]()
    inputs = {key: torch.randint(1, 32, (4, 8)) for key in ("input_ids", "labels")}
    program = check(model, inputs, tolerance=1e-6)  # the models route in fp32 in part
    assert num_products(program) == 4
    assert model.config._experts_implementation == "eager"


@pytest.mark.exhaustive
def test_switch_transformers() -> None:
    config = transformers.SwitchTransformersConfig(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        expert_capacity=3,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.SwitchTransformersForConditionalGeneration(config).double().train()
    for module in model.modules():
        if type(module).__name__ == "SwitchTransformersTop1Router":
            module.dtype = torch.float64
    ids = torch.randint(1, 32, (2, 4, 8))
    ones = torch.ones_like(ids[0])
    inputs = {"input_ids": ids[0], "labels": ids[1], "attention_mask": ones, "decoder_attention_mask": ones}
    assert num_products(check(model, inputs, tolerance=1e-12)) == 8


def centred(model: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Subtracts the mean over the rows of an expert: rows depend on each other."""
    flat, out = x.view(-1, WIDTH), torch.zeros_like(x).view(-1, WIDTH)
    for e, expert in enumerate(model.experts):
        token, _ = torch.where(chosen.view(-1, NUM_CHOSEN) == e)
        rows = flat[token]
        out.index_add_(0, token, expert(rows - rows.mean(0)))
    return out.view_as(x)


def different(model: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The experts compute different things."""
    flat, out = x.view(-1, WIDTH), torch.zeros_like(x).view(-1, WIDTH)
    chosen = chosen.view(-1, NUM_CHOSEN)
    for e, expert in enumerate(model.experts):
        token, _ = torch.where(chosen == e)
        out.index_add_(0, token, expert(flat[token]) if e else functional.relu(flat[token]))
    return out.view_as(x)


@pytest.mark.parametrize(("loop", "reason"), [(centred, "mean on the rows"), (different, "not called for every")])
def test_loops_that_are_no_product_are_an_error_with_the_line(loop: Callable[..., Tensor], reason: str) -> None:
    _, inputs = mixture("one_hot")
    with pytest.raises(CaptureError, match=rf"test_expert_loops.py:\d+.*{reason}.*index_add_"):
        capture(Mixture(loop).double(), (), inputs)


class WritesByMask(nn.Module):
    """A padding mask made by comparing ids with numbers, as Longformer makes it: no loop over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        bias = torch.zeros_like(x)
        bias[kinds == 2] = 3.0
        bias[kinds == 0] = torch.finfo(x.dtype).eps
        return (self.linear(x) + bias).square().mean()


def test_writing_numbers_by_mask_is_no_expert_loop() -> None:
    model, x, kinds = WritesByMask(), torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 1, 0])
    program = capture(model, (x, kinds))
    values = run_program(program, model, (x, kinds), {})
    torch.testing.assert_close(outputs_of(program, values, "loss")["loss"], model(x, kinds).detach())


class MeanByMask(nn.Module):
    """The mean of the rows of one kind: their number depends on the data, and no other kind follows."""

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        return x[kinds == 2].mean()


def test_reading_by_one_mask_is_explained_as_a_shape() -> None:
    with pytest.raises(CaptureError, match=r"shape depends on values.*keep all elements and mask"):
        capture(MeanByMask(), (torch.randn(6, 4, requires_grad=True), torch.tensor([0, 1, 2, 2, 1, 0])))


@pytest.mark.exhaustive
def test_the_plan_says_that_no_token_is_dropped() -> None:
    model, inputs = mixture(next(iter(LOOPS)))
    plan = autopar.plan(model, inputs, cluster="2 H100-SXM", mode="fast")
    assert any("no token is dropped" in note for note in plan.notes)
