"""Which models of transformers are written tensor by tensor, and what stands beside their weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from torch import nn

from autopar.runtime.weights.pretrained_folders import is_saved_as_it_is, save_all_but_weights

TINY = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 16, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def model(config: transformers.PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made


def test_models_whose_tensors_are_converted_are_written_by_their_own_method() -> None:
    assert is_saved_as_it_is(model(transformers.LlamaConfig(**TINY)))
    experts = model(transformers.MixtralConfig(**TINY, num_local_experts=2))
    assert not is_saved_as_it_is(experts), "its experts are joined in memory and apart in files"
    assert not is_saved_as_it_is(nn.Linear(2, 2))
    quantized = model(transformers.LlamaConfig(**TINY))
    quantized.hf_quantizer = object()
    assert not is_saved_as_it_is(quantized)


def test_the_configuration_is_written_and_stays_as_it_was(tmp_path: Path) -> None:
    llama = model(transformers.LlamaConfig(**TINY)).to(torch.bfloat16)
    before = llama.config.to_dict()
    save_all_but_weights(llama, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert written["dtype"] == "bfloat16"
    assert llama.config.to_dict() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.json", "generation_config.json"]
