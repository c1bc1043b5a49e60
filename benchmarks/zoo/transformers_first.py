"""The models of `transformers` with which autopar began; their factories are shared with the workloads.

Tiny configurations keep what makes their family hard to split: tied embeddings (GPT-2, BERT, T5), grouped-query
heads (Llama), relative position bias and cross attention (T5), a class token (ViT).
"""

from __future__ import annotations

import torch

from benchmarks.models import bert, gpt2, llama, t5, vit
from benchmarks.zoo.registry import Inputs, ZooEntry


def _tokens(batch: int) -> Inputs:
    return {"input_ids": torch.randint(0, 96, (batch, 16)), "labels": torch.randint(0, 96, (batch, 16))}


def _images(batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 8, (batch,))}


ENTRIES = (
    ZooEntry(
        name="gpt2",
        family="causal",
        build=lambda: gpt2(layers=2, width=32, heads=4, vocabulary=96, positions=16),
        inputs=_tokens,
    ),
    ZooEntry(
        name="llama",
        family="causal",
        build=lambda: llama(layers=2, width=32, hidden=64, heads=8, kv_heads=4, vocabulary=96, positions=16),
        inputs=_tokens,
    ),
    ZooEntry(
        name="bert",
        family="masked",
        build=lambda: bert(layers=2, width=32, heads=4, vocabulary=96, positions=16),
        inputs=_tokens,
    ),
    ZooEntry(
        name="t5",
        family="encoder-decoder",
        build=lambda: t5(layers=2, width=32, heads=4, vocabulary=96),
        inputs=_tokens,
    ),
    ZooEntry(
        name="vit",
        family="vision",
        build=lambda: vit(layers=2, width=32, heads=4, size=16, patch=4, classes=8),
        inputs=_images,
    ),
)
