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
from benchmarks.vision import UNet

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


def images_and_labels(classes: int) -> Callable[[int, int], Inputs]:
    """Inputs of a classifier: images of shape (batch, 3, size, size) and labels (batch,)."""

    def make(batch: int, size: int) -> Inputs:
        return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch,))}

    return make


def images_and_masks(classes: int) -> Callable[[int, int], Inputs]:
    """Inputs of a segmentation: images of shape (batch, 3, size, size) and masks (batch, size, size)."""

    def make(batch: int, size: int) -> Inputs:
        return {"images": torch.randn(batch, 3, size, size), "masks": torch.randint(0, classes, (batch, size, size))}

    return make


class LossOnly(nn.Module):
    """A language model without its logits: a step that returns them holds those of the whole batch, and every rank has
    to get them. forward(input_ids, labels) -> loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


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


def t5(
    *, layers: int, width: int, heads: int, vocabulary: int, head_width: int | None = None, hidden: int | None = None
) -> nn.Module:
    """T5 encoder-decoder without dropout; heads of width / heads and 4 * width hidden units where nothing is said."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(  # type: ignore[call-arg]  # every configuration takes the base class's keywords
            num_layers=layers,
            d_model=width,
            d_kv=head_width or width // heads,
            d_ff=hidden or 4 * width,
            num_heads=heads,
            vocab_size=vocabulary,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def olmoe(*, layers: int, width: int, hidden: int, heads: int, experts: int, chosen: int, vocabulary: int) -> nn.Module:
    """OLMoE: every token goes through `chosen` of `experts` experts of every layer."""
    return transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_experts=experts,
            num_experts_per_tok=chosen,
            vocab_size=vocabulary,
            max_position_embeddings=4096,
            use_cache=False,
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
    "llama3-70b": ModelEntry(
        build=lambda: llama(
            layers=80, width=8192, hidden=28672, heads=64, kv_heads=8, vocabulary=128256, positions=8192
        ),
        inputs=token_inputs(128256),
        batch=512,
        seq=8192,
    ),
    "llama3.1-405b": ModelEntry(
        build=lambda: llama(
            layers=126, width=16384, hidden=53248, heads=128, kv_heads=8, vocabulary=128256, positions=8192
        ),
        inputs=token_inputs(128256),
        batch=2048,
        seq=8192,
    ),
    "olmoe-64-experts": ModelEntry(
        build=lambda: olmoe(layers=16, width=2048, hidden=1024, heads=16, experts=64, chosen=8, vocabulary=50304),
        inputs=token_inputs(50304),
        batch=64,
        seq=4096,
    ),
    "unet": ModelEntry(
        build=lambda: UNet(channels=(64, 128, 256, 512, 1024), classes=21),
        inputs=images_and_masks(21),
        batch=64,
        seq=256,
    ),
    "vit-22b": ModelEntry(
        build=lambda: vit(layers=48, width=6144, heads=48, size=224, patch=14, classes=1000),
        inputs=images_and_labels(1000),
        batch=1024,
        seq=224,
    ),
    "t5-11b": ModelEntry(
        build=lambda: t5(layers=24, width=1024, heads=128, vocabulary=32128, head_width=128, hidden=65536),
        inputs=token_inputs(32128),
        batch=128,
        seq=512,
    ),
}
"""Real sizes, built on the meta device: nothing is allocated."""


def workload(name: str, *, batch: int | None = None, seq: int | None = None) -> tuple[nn.Module, Inputs]:
    """A model of real size in bf16 and its inputs (images in bf16 too), all on the meta device."""
    entry = WORKLOADS[name]
    with torch.device("meta"):
        inputs = entry.inputs(batch or entry.batch, seq or entry.seq)
        narrow = {name: v.bfloat16() if v.is_floating_point() else v for name, v in inputs.items()}
        return entry.build().to(torch.bfloat16).train(), narrow
