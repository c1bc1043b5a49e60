"""litgpt's decoders and fair-esm's ESM-2, a masked model of proteins."""

from __future__ import annotations

from typing import Any

import esm
import torch
from litgpt.config import Config
from litgpt.model import GPT
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("litgpt", "lightning", "esm")
_WORDS, _TOKENS = 64, 16


def _tokens(batch: int) -> Inputs:
    return {"idx": torch.randint(0, _WORDS, (batch, _TOKENS)), "labels": torch.randint(0, _WORDS, (batch, _TOKENS))}


def _next_token(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1)[:, :_WORDS], batch["labels"].flatten())


def _gpt(name: str, **arguments: Any) -> ZooEntry:
    def build() -> nn.Module:
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "padded_vocab_size": _WORDS, "block_size": 32, **arguments}
        model: nn.Module = GPT(Config.from_name(name, **sizes))
        return model

    return ZooEntry(name=f"litgpt/{name}", family="causal", build=build, inputs=_tokens, loss_fn=_next_token)


def _residues(output: Any, batch: Inputs) -> Tensor:
    logits = output["logits"]
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


ENTRIES = (
    _gpt("pythia-14m", intermediate_size=64),
    _gpt("Llama-3.2-1B", n_query_groups=2, intermediate_size=64, head_size=8),
    _gpt("Gemma-2b", n_query_groups=1, intermediate_size=64, head_size=8),
    _gpt("Gemma-2-2b", n_query_groups=2, intermediate_size=64, head_size=8, attention_scores_scalar=8),
    _gpt("phi-1_5", intermediate_size=64),
    _gpt("falcon-7b", n_query_groups=1),
    _gpt("Qwen2.5-0.5B", n_query_groups=2, intermediate_size=64, head_size=8),
    _gpt("Mistral-7B-v0.1", n_query_groups=2, intermediate_size=64, sliding_window_size=8),
    ZooEntry(
        name="esm/esm2",
        family="masked",
        build=lambda: esm.ESM2(num_layers=2, embed_dim=32, attention_heads=4, token_dropout=False),
        inputs=lambda batch: {
            "tokens": torch.randint(4, 24, (batch, _TOKENS)),
            "labels": torch.randint(4, 24, (batch, _TOKENS)),
        },
        loss_fn=_residues,
        branches="example",
    ),
)
