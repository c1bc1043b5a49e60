"""Hugging Face models are traced with simpler decisions, and every decision is restored."""

from __future__ import annotations

import os

import pytest
import torch
import transformers

from autopar.capture import capture, huggingface
from autopar.errors import CaptureError
from autopar.passes.tidy.read_masks import ATTENTION
from benchmarks.context_parity.models import hugging_face
from benchmarks.same_programs import capture_reasons
from benchmarks.zoo.registry import zoo_model
from tests.capture.execute import eager_step, outputs_of, run_program, worst_gradient_error

SWITCH = "TRANSFORMERS_DISABLE_TORCH_CHECK"


def test_image_tokens_are_captured_because_their_count_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = zoo_model("llava")
    assert capture(model, (), inputs).training
    monkeypatch.setattr(huggingface, "_WITHOUT_CHECKS", {})
    with pytest.raises(CaptureError, match="decides by the values"):
        capture(model, (), inputs)


def test_the_switch_for_checks_is_as_before_after_a_capture() -> None:
    before = os.environ.get(SWITCH)
    model, inputs = zoo_model("gpt2")
    capture(model, (), inputs)
    assert os.environ.get(SWITCH) == before


def test_the_first_capture_of_a_model_is_by_blocks_and_hidden_states_are_returned_after_it() -> None:
    configuration = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=6, num_attention_heads=2, vocab_size=16
    )
    model = transformers.LlamaForCausalLM(configuration)
    tokens = torch.randint(0, 16, (4, 8))
    with capture_reasons() as reasons:
        capture(model, (), {"input_ids": tokens, "labels": tokens})
    assert reasons == ["model.layers: 4 of 6 equal modules are traced"]
    assert len(model(input_ids=tokens, output_hidden_states=True).hidden_states) == 7


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_model_that_makes_its_mask_only_outside_of_compilers_is_captured() -> None:
    config = transformers.SwitchTransformersConfig(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=2, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1, num_experts=2, expert_capacity=64, decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    model = transformers.SwitchTransformersForConditionalGeneration(config)
    tokens = torch.randint(1, 64, (2, 8))
    program = capture(model, (), {"input_ids": tokens, "labels": tokens})
    assert program.training


class _Prefixed(torch.nn.Module):
    """A language model after learned keys and values, as prefix tuning makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.model, _ = zoo_model("gpt2")
        config = self.model.config
        shape = (2, 4, config.num_attention_heads, 3, config.hidden_size // config.num_attention_heads)
        self.prefix = torch.nn.Parameter(torch.randn(shape))

    def forward(self, input_ids: torch.Tensor, **options: bool) -> transformers.utils.ModelOutput:
        cache = transformers.DynamicCache()
        for layer in range(self.model.config.num_hidden_layers):
            cache.update(self.prefix[0], self.prefix[1], layer)
        output = self.model(input_ids, past_key_values=cache, labels=input_ids)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=output.loss, past_key_values=cache)


def test_a_cache_that_nobody_asked_for_is_no_output() -> None:
    tokens = torch.randint(0, 16, (4, 8))
    program = capture(_Prefixed(), (), {"input_ids": tokens})
    assert program.training
    assert "prefix" in {entry.name for entry in program.inputs if entry.role == "parameter"}
    with pytest.raises(CaptureError, match="past_key_values is a DynamicCache"):
        capture(_Prefixed(), (), {"input_ids": tokens, "use_cache": True})


@pytest.mark.parametrize(
    ("name", "window", "options"),
    [("MistralForCausalLM", (True, 8), {"sliding_window": 8}),
     ("ModernBertForMaskedLM", (False, 5), {"local_attention": 8, "pad_token_id": 0})],
)  # fmt: skip
def test_sliding_windows_leave_no_mask_and_train_like_the_model(
    name: str, window: tuple[bool, int], options: dict[str, int]
) -> None:
    model, inputs = hugging_face(name, **options)()
    program = capture(model, (), inputs)
    calls = [node.args for node in program.graph.nodes if node.target in ATTENTION]
    windows = [call for call in calls if len(call) in (9, 12)]
    assert {(call[-4], call[-1]) for call in windows} == {window}
    assert all(call[3 if len(call) < 10 else 4] is None for call in calls), "no mask"
    _, expected, _ = eager_step(model, (), inputs)
    gradients = outputs_of(program, run_program(program, model, (), inputs), "gradient")
    assert worst_gradient_error({each: gradients[each] for each in expected}, expected) < 1e-6
