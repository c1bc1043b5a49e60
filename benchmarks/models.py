"""Workloads: models of real size on the meta device, and the factories that the tiny models of the zoo share.

    model, inputs = workload("llama3-8b", batch=16, seq=8192)

Every factory returns a module whose forward takes the inputs as keywords and whose output is a loss or has `.loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import transformers
from torch import nn

from autopar.demo.gpt import GPT, GPTConfig

Inputs: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """build: makes the module on the current default device; inputs: (batch, seq) -> keywords of forward."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    batch: int
    seq: int


def token_inputs(vocabulary: int, label: str = "labels", tokens: str = "input_ids") -> Callable[[int, int], Inputs]:
    """Inputs of a language model: random tokens and labels of shape (batch, seq)."""

    def make(batch: int, seq: int) -> Inputs:
        return {
            tokens: torch.randint(0, vocabulary, (batch, seq)),
            label: torch.randint(0, vocabulary, (batch, seq)),
        }

    return make


def gpt2(*, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> nn.Module:
    """GPT-2 of `transformers` without dropout."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            vocab_size=vocabulary,
            n_positions=positions,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def llama(
    *, layers: int, width: int, hidden: int, heads: int, kv_heads: int, vocabulary: int, positions: int
) -> nn.Module:
    """Llama of `transformers`."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocabulary,
            max_position_embeddings=positions,
            use_cache=False,
        )
    )


def bert(*, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> nn.Module:
    """BERT with its masked-language head, without dropout."""
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            vocab_size=vocabulary,
            max_position_embeddings=positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5(*, layers: int, width: int, heads: int, vocabulary: int) -> nn.Module:
    """T5 encoder-decoder without dropout."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(  # type: ignore[call-arg]  # every configuration takes the base class's keywords
            num_layers=layers,
            d_model=width,
            d_kv=width // heads,
            d_ff=4 * width,
            num_heads=heads,
            vocab_size=vocabulary,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def vit(*, layers: int, width: int, heads: int, size: int, patch: int, classes: int) -> nn.Module:
    """Vision transformer with a classifier, without dropout."""
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(  # type: ignore[call-arg]  # every configuration takes the base class's keywords
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            image_size=size,
            patch_size=patch,
            num_labels=classes,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


WORKLOADS: dict[str, ModelEntry] = {
    "tiny": ModelEntry(
        build=lambda: gpt2(layers=2, width=64, heads=8, vocabulary=512, positions=64),
        inputs=token_inputs(512),
        batch=16,
        seq=64,
    ),
    "gpt2": ModelEntry(
        build=lambda: gpt2(layers=12, width=768, heads=12, vocabulary=50257, positions=1024),
        inputs=token_inputs(50257),
        batch=32,
        seq=1024,
    ),
    "gpt2-1.3b": ModelEntry(
        build=lambda: gpt2(layers=24, width=2048, heads=16, vocabulary=50304, positions=2048),
        inputs=token_inputs(50304),
        batch=64,
        seq=2048,
    ),
    "demo-1.3b": ModelEntry(
        build=lambda: GPT(GPTConfig(vocabulary=50304, positions=2048, width=2048, heads=16, layers=24)),
        inputs=token_inputs(50304, tokens="tokens", label="labels"),
        batch=64,
        seq=2048,
    ),
    "llama3-8b": ModelEntry(
        build=lambda: llama(
            layers=32, width=4096, hidden=14336, heads=32, kv_heads=8, vocabulary=128256, positions=8192
        ),
        inputs=token_inputs(128256),
        batch=16,
        seq=8192,
    ),
    "t5": ModelEntry(
        build=lambda: t5(layers=6, width=1024, heads=16, vocabulary=32128),
        inputs=token_inputs(32128),
        batch=16,
        seq=512,
    ),
}
"""Real sizes, built on the meta device: nothing is allocated."""


def workload(name: str, *, batch: int | None = None, seq: int | None = None) -> tuple[nn.Module, Inputs]:
    """A model of real size in bf16 and its inputs, all on the meta device."""
    entry = WORKLOADS[name]
    with torch.device("meta"):
        return entry.build().to(torch.bfloat16).train(), entry.inputs(batch or entry.batch, seq or entry.seq)
