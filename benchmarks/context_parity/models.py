"""Models with attention of every kind, tiny and in fp64: what an axis cp must split without changing a number.

    model, inputs = MODELS["gpt2"]()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.transformers_tiny import tiny_config

Case: TypeAlias = tuple[nn.Module, dict[str, Tensor]]
VOCABULARY, TOKENS, BATCH = 96, 32, 2
DROPOUT = 0.2


def hugging_face(name: str, tokens: int = TOKENS, **changes: Any) -> Callable[[], Case]:
    """A model of transformers with tokens (BATCH, tokens) and labels of which some are ignored."""

    def build() -> Case:
        torch.manual_seed(0)
        model_class = getattr(transformers, name)
        model = model_class(tiny_config(model_class.config_class, **changes)).double().train()
        return LossOnly(model), _tokens(tokens)

    return build


def padded(name: str, tokens: int = TOKENS, **changes: Any) -> Callable[[], Case]:
    """The same, with rows that end in padding of different lengths."""

    def build() -> Case:
        model, inputs = hugging_face(name, tokens, **changes)()
        padding = torch.arange(tokens) >= tokens - 3 * torch.arange(1, BATCH + 1).unsqueeze(1)
        inputs["input_ids"][padding], inputs["labels"][padding] = 0, -100
        return model, {**inputs, "attention_mask": (~padding).long()}

    return build


class LossOnly(nn.Module):
    """A model of transformers without its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(**inputs).loss
        return loss


class Documents(nn.Module):
    """Causal attention inside of packed documents. forward(ids, document, labels) -> loss."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.projected, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, document: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        parts = self.projected(self.norm(hidden)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        place = torch.arange(ids.shape[1], device=ids.device)
        seen = (same & (place.unsqueeze(-1) >= place)).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(-2))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Stack(nn.Module):
    """Blocks of attention, causal or not, with dropout. forward(x (B, T, width), target) -> loss."""

    def __init__(self, causal: bool, dropout: float, layers: int = 2, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.projected = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for projected, out in zip(self.projected, self.out, strict=True):
            parts = projected(x).chunk(3, -1)
            query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=self.causal, dropout_p=self.dropout if self.training else 0.0
            )
            x = x + F.gelu(out(mixed.transpose(1, 2).flatten(-2)))
        return F.mse_loss(x, target)


def stack(causal: bool, dropout: float = 0.0, tokens: int = TOKENS) -> Callable[[], Case]:
    """`Stack` and its inputs."""

    def build() -> Case:
        torch.manual_seed(0)
        model = Stack(causal, dropout).double()
        x, target = torch.randn(2, BATCH, tokens, 32, dtype=torch.float64)
        return model, {"x": x, "target": target}

    return build


def _tokens(tokens: int) -> dict[str, Tensor]:
    labels = torch.randint(3, VOCABULARY, (BATCH, tokens))
    labels[torch.rand(BATCH, tokens) < 0.2] = -100
    return {"input_ids": torch.randint(3, VOCABULARY, (BATCH, tokens)), "labels": labels}


def _documents() -> Case:
    torch.manual_seed(0)
    ids, labels = torch.randint(0, VOCABULARY, (2, BATCH, TOKENS))
    place = torch.arange(TOKENS)
    document = torch.stack([(place >= 7).long() + (place >= 22), (place >= 11).long()])
    return Documents().double(), {"ids": ids, "document": document, "labels": labels}


def _vit() -> Case:
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(tiny_config(transformers.ViTConfig)).double().train()
    return LossOnly(model), {
        "pixel_values": torch.randn(BATCH, 3, 32, 32, dtype=torch.float64), "labels": torch.randint(0, 8, (BATCH,))
    }  # fmt: skip


_DROPOUT: dict[str, Any] = {"resid_pdrop": DROPOUT, "embd_pdrop": DROPOUT, "attn_pdrop": DROPOUT}

MODELS: Mapping[str, Callable[[], Case]] = {
    "llama, 1 key head": hugging_face("LlamaForCausalLM", num_key_value_heads=1),
    "llama, 2 key heads": hugging_face("LlamaForCausalLM", num_key_value_heads=2),
    "llama, 4 key heads": hugging_face("LlamaForCausalLM", num_key_value_heads=4),
    "llama, 30 tokens": hugging_face("LlamaForCausalLM", 30),
    "llama, 37 tokens": hugging_face("LlamaForCausalLM", 37),
    "llama, padded": padded("LlamaForCausalLM"),
    "gpt2, dropout": hugging_face("GPT2LMHeadModel", **_DROPOUT),
    "gpt2, 37 tokens": hugging_face("GPT2LMHeadModel", 37, **_DROPOUT),
    "bert, padded": padded("BertForMaskedLM"),
    "t5, padded": padded("T5ForConditionalGeneration", decoder_start_token_id=0),
    "vit": _vit,
    "gemma2": hugging_face("Gemma2ForCausalLM", sliding_window=8),
    "gemma3": hugging_face(
        "Gemma3ForCausalLM", sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "mistral, padded": padded("MistralForCausalLM", sliding_window=8),
    "documents": _documents,
    "stack": stack(causal=False),
    "stack, causal, dropout": stack(causal=True, dropout=DROPOUT),
    "stack, causal, 37 tokens": stack(causal=True, dropout=DROPOUT, tokens=37),
}
"""Name -> model and the keywords of its forward."""
IN_ZIGZAG = (
    "llama, 1 key head", "llama, 2 key heads", "llama, 4 key heads", "llama, padded", "gpt2, dropout", "gemma3",
    "documents", "stack, causal, dropout",
)  # fmt: skip
"""Those with a causal attention without a window, of a length that 16 divides."""
