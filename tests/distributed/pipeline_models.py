"""Small models whose blocks become stages: chains, an encoder with a decoder, long skips, experts, mixed precision."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.distributed.micro_jobs import SEQUENCE, VOCABULARY, unevenly_labelled

Batch = Mapping[str, torch.Tensor]


class SkipNet(nn.Module):
    """Two steps down, two up, each of the up-path reading the step down of its size."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(3, width), self._block(width, 2 * width)])
        self.up = nn.ModuleList([self._block(4 * width, width), self._block(2 * width, width)])
        self.head = nn.Conv2d(width, 5, 1)
        self.dropout = nn.Dropout(dropout)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.SiLU())

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        first = self.down[0](images)
        second = self.down[1](F.avg_pool2d(first, 2))
        up = self.up[0](torch.cat([second, self.dropout(second).tanh()], 1))
        up = self.up[1](torch.cat([F.interpolate(up, scale_factor=2.0), first], 1))
        logits = self.head(up)
        return {"loss": F.cross_entropy(logits, targets), "logits": logits}


def pictures(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "images": torch.randn(8, 3, 8, 8, generator=generator),
        "targets": torch.randint(0, 5, (8, 8, 8), generator=generator),
    }


def gpt2(dropout: float = 0.0, blocks: int = 4) -> nn.Module:
    """The embedding is the head."""
    sizes = {"n_layer": blocks, "n_head": 2, "n_embd": 16, "vocab_size": VOCABULARY, "n_positions": SEQUENCE}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, use_cache=False))


def llama() -> nn.Module:
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(**heads, **sizes, use_cache=False))


def t5() -> nn.Module:
    """Two blocks each; embedding, decoder and head are tied, position biases belong to the first block."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def olmoe() -> nn.Module:
    """Four blocks of four experts, in fp64, which routes alike on every device."""
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    config = OlmoeConfig(**heads, **sizes, **experts, use_cache=False, pad_token_id=0)
    config._experts_implementation = "eager"  # the others want fp32
    return OlmoeForCausalLM(config).double()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The modules that end the stages but the last, for two stages, four, and eight where the model has them."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    halves: tuple[str, ...]
    quarters: tuple[str, ...]
    eighths: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """The same weights everywhere."""
        torch.manual_seed(0)
        return copy.deepcopy(self.build())


CASES: Mapping[str, Case] = {
    "gpt2": Case(
        build=gpt2,
        batch=unevenly_labelled,
        halves=("transformer.h.1",),
        quarters=("transformer.h.0", "transformer.h.1", "transformer.h.2"),
    ),
    "deep": Case(
        build=functools.partial(gpt2, blocks=8),
        batch=unevenly_labelled,
        halves=("transformer.h.3",),
        quarters=("transformer.h.1", "transformer.h.3", "transformer.h.5"),
        eighths=tuple(f"transformer.h.{index}" for index in range(7)),
    ),
    "gpt2-bf16": Case(
        build=gpt2,
        batch=unevenly_labelled,
        halves=("transformer.h.1",),
        quarters=("transformer.h.0", "transformer.h.1", "transformer.h.2"),
        options={"precision": "bf16"},
    ),
    "llama": Case(
        build=llama,
        batch=unevenly_labelled,
        halves=("model.layers.1",),
        quarters=("model.layers.0", "model.layers.1", "model.layers.2"),
    ),
    "olmoe": Case(
        build=olmoe,
        batch=unevenly_labelled,
        halves=("model.layers.1",),
        quarters=("model.layers.0", "model.layers.1", "model.layers.2"),
    ),
    "t5": Case(
        build=t5,
        batch=unevenly_labelled,
        halves=("encoder.final_layer_norm",),
        quarters=("encoder.block.0", "encoder.final_layer_norm", "decoder.block.0"),
    ),
    "skips": Case(build=SkipNet, batch=pictures, halves=("down.1",), quarters=("down.0", "down.1", "up.0")),
}
