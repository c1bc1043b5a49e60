"""sentence-transformers: encoders of sentences with its pooling, layers and losses; a tiny BERT below them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import CNN, LSTM, Dense, Pooling
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("sentence_transformers",)
TOKENS, LENGTH, WIDTH = 64, 10, 32


class _Words(nn.Module):
    """The package's Transformer module without its tokenizer, which a hub would have to give."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "hidden_size": WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        self.model = BertModel(
            BertConfig(vocab_size=TOKENS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes),
            add_pooling_layer=False,
        )

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.model(features["input_ids"], attention_mask=features["attention_mask"]).last_hidden_state
        return {**features, "token_embeddings": hidden, "sentence_lengths": features["attention_mask"].sum(1)}


class _Pairs(nn.Module):
    """A loss of the package over pairs of sentences, with the inputs as tensors."""

    def __init__(self, loss: Callable[[nn.Module], nn.Module], *modules: nn.Module) -> None:
        super().__init__()
        self.loss = loss(nn.Sequential(_Words(), *modules))

    def forward(self, first: Tensor, second: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        features = [{"input_ids": ids, "attention_mask": mask} for ids in (first, second)]
        return cast(Tensor, self.loss(features, labels))


def _pairs(batch: int) -> Inputs:
    first, second = torch.randint(0, TOKENS, (2, batch, LENGTH)).unbind()
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (batch, 1))
    return {
        "first": first,
        "second": second,
        "mask": (torch.arange(LENGTH) < lengths).long(),
        "labels": torch.rand(batch),
    }


def _entry(name: str, loss: Any, *modules: Callable[[], nn.Module]) -> ZooEntry:
    return ZooEntry(
        name=f"sentence_transformers/{name}",
        family="masked",
        build=lambda: _Pairs(loss, *(module() for module in modules)),
        inputs=_pairs,
    )


ENTRIES = (
    _entry("mean_cosine", losses.CosineSimilarityLoss, lambda: Pooling(WIDTH, "mean")),
    _entry(
        "max_dense_ranking",
        losses.MultipleNegativesRankingLoss,
        lambda: Pooling(WIDTH, "max"),
        lambda: Dense(WIDTH, 16),
    ),
    _entry("cnn_cosent", losses.CoSENTLoss, lambda: CNN(WIDTH, 8, [1, 3]), lambda: Pooling(16, "weightedmean")),
    _entry("lstm_cosine", losses.CosineSimilarityLoss, lambda: LSTM(WIDTH, 8), lambda: Pooling(16, "mean")),
)
