"""Which models of transformers are written tensor by tensor, and what stands beside their weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopar.runtime.weights.found_weights import find_weights
from autopar.runtime.weights.initialise import fill_buffers
from autopar.runtime.weights.pretrained_folders import is_saved_as_it_is, save_all_but_weights
from autopar.runtime.weights.written_weights import save_weights

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


FAMILIES: dict[str, transformers.PretrainedConfig] = {
    "rotary": transformers.LlamaConfig(**TINY),
    "experts": transformers.MixtralConfig(**TINY, num_local_experts=2),
    "positions": transformers.BertConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16, is_decoder=True
    ),
    "rotary of several kinds": transformers.Gemma3TextConfig(**TINY, head_dim=8),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_are_read_and_buffers_computed_as_transformers_does(family: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    reference: Any = transformers.AutoModelForCausalLM.from_config(FAMILIES[family])
    reference.save_pretrained(tmp_path, save_original_format=False)
    empty = model(FAMILIES[family])
    found = find_weights(empty, tmp_path)
    assert found is not None
    fill_buffers(empty, torch.device("cpu"), found.tensors)
    buffers = {name: buffer for name, buffer in reference.named_buffers() if name not in found.tensors}
    assert buffers
    assert all(torch.equal(empty.get_buffer(name), buffer) for name, buffer in buffers.items())
    out = tmp_path / "out"
    beside = partial(save_all_but_weights, reference)
    save_weights(reference, {}, out, torch.device("cpu"), most_bytes=4_000, others=beside)
    back = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(back[name], value) for name, value in reference.state_dict().items())
