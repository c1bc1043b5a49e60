"""Captured graphs, run as they are, give the loss, the gradients and the buffers of the plain model."""

import pytest
import torch
from torch import nn

from autopar.capture import capture, fingerprint
from autopar.program import Program
from tests.capture.execute import eager_step, outputs_of, run_program, worst_gradient_error
from tests.capture.small_models import FAST, SLOW

MODELS = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
ALL = {**FAST, **SLOW}


@pytest.mark.exhaustive(sample=["mlp", "resnet", "gpt2"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_buffers_equal_eager(name: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs = ALL[name]()
    model.train()
    parameters = dict(model.named_parameters())
    program = capture(model, args, kwargs)
    assert all(parameters[name] is p and not p.is_meta for name, p in model.named_parameters())
    loss, gradients, buffers = eager_step(model, args, kwargs)
    values = run_program(program, model, args, kwargs)
    (captured_loss,) = outputs_of(program, values, "loss").values()
    torch.testing.assert_close(captured_loss, loss, rtol=1e-5, atol=0)
    assert worst_gradient_error(outputs_of(program, values, "gradient"), gradients) < 1e-5
    for buffer, value in outputs_of(program, values, "mutation").items():
        torch.testing.assert_close(value, buffers[buffer])
    check_metadata(program)
    assert fingerprint(capture(model, args, kwargs)) == fingerprint(program)


def check_metadata(program: Program) -> None:
    """Roles match placeholders, names are unique, phases respect data flow."""
    assert len(program.placeholders) == len(program.inputs)
    assert len(program.returned) == len(program.outputs)
    operators = [node for node in program.graph.nodes if node.op == "call_function"]
    names = [node.meta["operator"] for node in operators]
    assert len(set(names)) == len(names)
    assert {node.op for node in program.graph.nodes} == {"placeholder", "call_function", "output"}
    for node in operators:
        assert "val" in node.meta
        assert node.meta["operator"].endswith("/bwd") == (node.meta["phase"] == "backward")
        if node.meta["phase"] == "forward":
            assert all(operand.meta["phase"] == "forward" for operand in node.all_input_nodes)


def test_a_wrong_gradient_is_noticed() -> None:
    """The comparison above proves itself: one gradient scaled by 1.0001 fails it."""
    torch.manual_seed(0)
    model, args, kwargs = FAST["mlp"]()
    program = capture(model, args, kwargs)
    _, gradients, _ = eager_step(model, args, kwargs)
    actual = outputs_of(program, run_program(program, model, args, kwargs), "gradient")
    actual["network.0.weight"] = actual["network.0.weight"] * 1.0001
    assert worst_gradient_error(actual, gradients) > 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_causal_attention_keeps_its_flag(name: str) -> None:
    model, args, kwargs = FAST[name]()
    program = capture(model.train(), args, kwargs)
    attentions = [n for n in program.graph.nodes if n.target is torch.ops.autopar.attention.default]
    assert len(attentions) == 2
    for node in attentions:
        _, _, _, mask, _, is_causal, _, _ = node.args
        assert mask is None
        assert is_causal


def test_operators_are_named_after_modules() -> None:
    model, args, kwargs = FAST["gpt2"]()
    program = capture(model.train(), args, kwargs)
    names = {node.meta["operator"] for node in program.graph.nodes if node.op == "call_function"}
    assert {"transformer.h.0.attn.c_attn/mm#0", "transformer.h.1.attn/attention#0", "/amax#0"} <= names
    assert {"transformer.h.0.attn.c_attn/mm#0/bwd", "transformer.h.0.ln_2/add#0/bwd"} <= names


def test_tied_parameter_is_one_placeholder_with_alias() -> None:
    model, args, kwargs = FAST["gpt2"]()
    program = capture(model.train(), args, kwargs)
    (tied,) = [entry for entry in program.inputs if entry.aliases]
    assert (tied.name, tied.aliases) == ("transformer.wte.weight", ("lm_head.weight",))


def test_fused_projection_is_split_by_heads() -> None:
    """No split remains; q, k and v are selected from a dim of three."""
    model, args, kwargs = FAST["gpt2"]()
    program = capture(model.train(), args, kwargs)
    targets = [node.target for node in program.graph.nodes]
    aten = torch.ops.aten
    assert aten.split.Tensor not in targets
    assert targets.count(aten.select.int) == 6


def test_fingerprint_follows_content() -> None:
    model, args, kwargs = FAST["mlp"]()
    first = fingerprint(capture(model, args, kwargs))
    model.network[2] = nn.LayerNorm(64, eps=1e-6)
    assert fingerprint(capture(model, args, kwargs)) != first


def test_meta_model_is_captured_like_a_real_one() -> None:
    model, args, kwargs = FAST["llama"]()
    real = fingerprint(capture(model.train(), args, kwargs))
    on_meta = {name: value.to("meta") for name, value in kwargs.items()}
    assert fingerprint(capture(model.to("meta"), args, on_meta)) == real
