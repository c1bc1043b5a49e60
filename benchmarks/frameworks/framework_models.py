"""Models and data of the rows: small, with random weights, the same in every process.

gpt2()       a causal language model of transformers, fp32, without dropout; returns its loss
bert()       a classifier of transformers
scorer()     fp64; returns scores alone, so that the loop computes the loss
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

VOCABULARY, LENGTH, CLASSES = 64, 12, 4


def gpt2(*, dropout: float = 0.0) -> Any:
    """One layer of GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": VOCABULARY, "n_positions": 16}
    off: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0))


def bert() -> Any:
    """One layer of BERT with a head of four classes."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 16, "num_labels": CLASSES,
    }  # fmt: skip
    return BertForSequenceClassification(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def scorer() -> nn.Module:
    """Scores of four classes, fp64; the loss is the loop's."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()


class Texts(Dataset[dict[str, Tensor]]):
    """`count` rows of random tokens, with themselves, or a class, as labels."""

    def __init__(self, count: int, *, classes: bool = False, extra: bool = False, seed: int = 1) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=draws)
        self.labels = torch.randint(0, CLASSES, (count,), generator=draws) if classes else self.tokens
        self.extra = extra

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = {"input_ids": self.tokens[index], "labels": self.labels[index]}
        return {**found, "note": torch.tensor(index)} if self.extra else found


class Stream(IterableDataset[dict[str, Tensor]]):
    """`Texts` as a stream."""

    def __init__(self, count: int) -> None:
        self.texts = Texts(count)

    def __iter__(self) -> Any:
        return (self.texts[index] for index in range(len(self.texts)))


class Points(Dataset[tuple[Tensor, Tensor]]):
    """`count` random points of fp64 with a class each."""

    def __init__(self, count: int) -> None:
        draws = torch.Generator().manual_seed(2)
        self.x = torch.randn(count, 8, generator=draws, dtype=torch.float64)
        self.y = torch.randint(0, CLASSES, (count,), generator=draws)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]
