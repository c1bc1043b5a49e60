"""Models by name: factories and Hugging Face configurations, on meta, with example inputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopar.capture import capture, load_model
from autopar.errors import ConfigurationError
from tests.capture.small_models import SIZES

CONFIGS: dict[str, Any] = {
    "LlamaForCausalLM": transformers.LlamaConfig(**SIZES),
    "BertForMaskedLM": transformers.BertConfig(**SIZES),
    "T5ForConditionalGeneration": transformers.T5Config(
        d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, vocab_size=128, decoder_start_token_id=0
    ),
    "ViTForImageClassification": transformers.ViTConfig(**SIZES, image_size=32, patch_size=8),
}
MODULE = """
import torch
def plain():
    return torch.nn.Linear(3, 2)
def with_inputs(batch, dtype):
    return torch.nn.Linear(3, 2), torch.empty(batch, 3, dtype=dtype)
def wrong():
    return 3
"""


@pytest.mark.exhaustive(sample="ViTForImageClassification")
@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", *(pytest.param(name, marks=pytest.mark.slow) for name in list(CONFIGS)[1:])]
)
def test_huggingface_configuration_gives_a_capturable_model(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIGS[name].to_dict(), "architectures": [name]}))
    model, inputs = load_model(f"hf:{file}", batch=2, seq=8, dtype=torch.bfloat16)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert isinstance(inputs, dict)
    program = capture(model, (), inputs)
    assert program.outputs[0].role == "loss"
    assert all(i.batch_dim == 0 for i in program.inputs if i.role == "input")


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_factories.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("factories")
def test_factory_gives_model_and_inputs() -> None:
    model, inputs = load_model("my_factories:with_inputs", batch=5, seq=1, dtype=torch.float64)
    assert isinstance(model, nn.Linear)
    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.float64)
    assert isinstance(inputs, tuple)
    assert (inputs[0].shape, inputs[0].dtype) == ((5, 3), torch.float64)
    assert load_model("my_factories:plain", 1, 1)[1] == {}
    weights = [load_model("my_factories:plain", 1, 1, values=True)[0].weight for _ in range(2)]
    assert torch.equal(*weights)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_factories", "write package.module:factory"),
        ("no_such_module:f", "no module named 'no_such_module'"),
        ("my_factories:no", "has no function 'no'"),
        ("my_factories:wrong", "returned int"),
        ("hf:nowhere.json", "does not exist"),
    ],
)
def test_what_cannot_be_found_is_named(spec: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_model(spec, 1, 1)


def test_configuration_without_architecture_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(ConfigurationError, match='no list of "architectures"'):
        load_model(f"hf:{file}", 1, 1)
