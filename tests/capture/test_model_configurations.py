"""A configuration is data: nothing that it names is imported, downloaded or run, but a class of transformers."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from autopar.capture import load_model, model_configurations
from autopar.errors import ConfigurationError
from tests.capture.small_models import SIZES

LLAMA = transformers.LlamaConfig(**SIZES).to_dict()


def build(tmp_path: Path, **changed: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"], **changed}))
    load_model(f"hf:{tmp_path}", 2, 8)


@pytest.mark.parametrize("name", ["set_seed", "LlamaConfig", "AutoModel", "PreTrainedModel", "utils", "__name__"])
def test_only_a_model_of_transformers_is_made(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is no model of transformers"):
        build(tmp_path, architectures=[name])


def test_without_the_check_a_name_of_a_file_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: any name of transformers is taken."""
    called = []

    def planted(config: object) -> None:
        called.append(config)

    planted.config_class = transformers.LlamaConfig  # type: ignore[attr-defined]
    library = sys.modules["transformers"]
    monkeypatch.setattr(library, "planted", planted, raising=False)
    with pytest.raises(ConfigurationError, match="planted is no model of transformers"):
        build(tmp_path, architectures=["planted"])
    assert not called
    monkeypatch.setattr(model_configurations, "_class_of", lambda _, name: getattr(library, name))
    with pytest.raises(ConfigurationError, match="no example inputs are known for planted"):
        build(tmp_path, architectures=["planted"])
    assert called


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "theirs.Model"}}, "auto_map is .* names code of its own"),
        ({"text_config": {"auto_map": {"AutoModel": "theirs.Model"}}}, "text_config.auto_map is"),
        ({"trust_remote_code": True}, "trust_remote_code is 'True'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .* weights that train"),
        ({"attn_implementation": "kernels-community/flash-attn"}, "write one of eager, sdpa, flex_attention"),
        ({"_attn_implementation": {"": "theirs/kernel:f"}}, "kernels of a hub or another library are not loaded"),
        ({"attn_implementation": "flash_attention_2"}, "write one of eager, sdpa"),
        ({"experts_implementation": "theirs/kernel"}, "write one of eager, batched_mm, grouped_mm"),
        ({"backbone_config": {"use_pretrained_backbone": True}}, "nothing is downloaded"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is '1000000000'; at most 10,000 are built"),
        ({"num_labels": 10**9}, "at most 1,000,000 are built"),
        ({"hidden_act": "theirs"}, "cannot be built from it: KeyError: 'theirs'"),
    ],
)
def test_what_is_more_than_data_is_refused_by_its_entry(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        build(tmp_path, **changed)


def test_what_says_no_may_stand(tmp_path: Path) -> None:
    build(tmp_path, auto_map=None, trust_remote_code=False, quantization_config=None, attn_implementation="eager")


def test_a_model_that_asks_the_hub_is_told_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def downloading(*_: Any) -> None:
        transformers.AutoConfig.from_pretrained("somebody/something")

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", downloading)
    with pytest.raises(ConfigurationError, match="cannot be built from it"):
        build(tmp_path)
