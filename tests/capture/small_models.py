"""Tiny models of every kind that capture must handle, without dropout, so that gradients compare with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

BATCH, SEQ, VOCAB = 4, 16, 128
Case: TypeAlias = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
}
BERT_WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQ))


def with_labels(model: nn.Module) -> Case:
    return model, (), {"input_ids": tokens(), "labels": tokens()}


def gpt2() -> Case:
    config = transformers.GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        vocab_size=VOCAB,
        n_positions=64,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )  # fmt: skip
    return with_labels(transformers.GPT2LMHeadModel(config))


def llama() -> Case:
    return with_labels(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)))


def bert() -> Case:
    config = transformers.BertConfig(**SIZES, **BERT_WITHOUT_DROPOUT)
    return with_labels(transformers.BertForMaskedLM(config))


def t5() -> Case:
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=VOCAB, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    return with_labels(transformers.T5ForConditionalGeneration(config))


def vit() -> Case:
    config = transformers.ViTConfig(**SIZES, **BERT_WITHOUT_DROPOUT, image_size=32, patch_size=8, num_labels=10)
    inputs = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 10, (BATCH,))}
    return transformers.ViTForImageClassification(config), (), inputs


class Classifier(nn.Module):
    """Any network with a cross entropy behind it; returns the loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.network(x)
        return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.reshape(-1))


def mlp() -> Case:
    network = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))
    return Classifier(network), (torch.randn(BATCH, 32), torch.randint(0, 10, (BATCH,))), {}


def convolution(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)  # a bias before batch norm has gradient 0


class Residual(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Sequential(convolution(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU())
        self.second = nn.Sequential(convolution(outputs, outputs), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(self.first(x)) + self.shortcut(x))


def resnet() -> Case:
    network = nn.Sequential(
        Residual(3, 8), nn.MaxPool2d(2), Residual(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
    return Classifier(network), (torch.randn(BATCH, 3, 16, 16), torch.randint(0, 10, (BATCH,))), {}


def transformer_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    network = nn.Sequential(nn.Embedding(VOCAB, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, VOCAB))
    return Classifier(network), (tokens(), tokens()), {}


FAST: dict[str, Callable[[], Case]] = {"gpt2": gpt2, "llama": llama, "mlp": mlp}
SLOW: dict[str, Callable[[], Case]] = {
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "resnet": resnet,
    "transformer_encoder": transformer_encoder,
}
