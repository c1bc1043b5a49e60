"""An Evoformer block in plain torch, after AlphaFold 2 (supplement, algorithms 6 to 15), without dropout.

msa (B, S, R, C): S sequences of R residues; pair (B, R, R, D). Rows and columns take turns, which is what makes the
best sharding alternate too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.zoo.registry import Inputs, ZooEntry


class GatedAttention(nn.Module):
    """Attention over the last but one dim of x (..., L, C) with a sigmoid gate; bias (..., H, L, L) is added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.gate = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        query, key, value = (
            projected(x).unflatten(-1, (self.heads, -1)) for projected in (self.query, self.key, self.value)
        )
        logits = torch.einsum("...qhc,...khc->...hqk", query * query.shape[-1] ** -0.5, key)
        if bias is not None:
            logits = logits + bias
        mixed = torch.einsum("...hqk,...khc->...qhc", logits.softmax(-1), value)
        out: Tensor = self.out(torch.sigmoid(self.gate(x)) * mixed.flatten(-2))
        return out


class TriangleUpdate(nn.Module):
    """Triangle multiplicative update; `outgoing` edges share the first index."""

    def __init__(self, width: int, hidden: int, outgoing: bool) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(hidden)
        self.left, self.right = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.left_gate, self.right_gate = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.out, self.gate = nn.Linear(hidden, width), nn.Linear(width, width)
        self.equation = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"

    def forward(self, pair: Tensor) -> Tensor:
        x = self.norm_in(pair)
        left = torch.sigmoid(self.left_gate(x)) * self.left(x)
        right = torch.sigmoid(self.right_gate(x)) * self.right(x)
        updated = self.out(self.norm_out(torch.einsum(self.equation, left, right)))
        out: Tensor = torch.sigmoid(self.gate(x)) * updated
        return out


class TriangleAttention(nn.Module):
    """Attention around the starting node; on the transposed pair, around the ending node."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Linear(width, heads, bias=False)
        self.attention = GatedAttention(width, heads)

    def forward(self, pair: Tensor) -> Tensor:
        x = self.norm(pair)
        out: Tensor = self.attention(x, self.bias(x).permute(0, 3, 1, 2).unsqueeze(1))
        return out


class OuterProductMean(nn.Module):
    """msa -> update of pair: the mean over sequences of the outer product of two projections."""

    def __init__(self, width: int, hidden: int, pair_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.left, self.right = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.out = nn.Linear(hidden * hidden, pair_width)

    def forward(self, msa: Tensor) -> Tensor:
        x = self.norm(msa)
        outer = torch.einsum("bsic,bsjd->bijcd", self.left(x), self.right(x)) / msa.shape[1]
        out: Tensor = self.out(outer.flatten(-2))
        return out


def _transition(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class Evoformer(nn.Module):
    """One block with a masked-residue head. forward(msa, pair, labels (B, S, R)) -> loss."""

    def __init__(self, *, width: int, pair_width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.row_norm, self.pair_norm, self.column_norm = (
            nn.LayerNorm(width),
            nn.LayerNorm(pair_width),
            nn.LayerNorm(width),
        )
        self.pair_bias = nn.Linear(pair_width, heads, bias=False)
        self.row, self.column = GatedAttention(width, heads), GatedAttention(width, heads)
        self.msa_transition, self.pair_transition = _transition(width), _transition(pair_width)
        self.outer = OuterProductMean(width, 4, pair_width)
        self.outgoing = TriangleUpdate(pair_width, pair_width, outgoing=True)
        self.incoming = TriangleUpdate(pair_width, pair_width, outgoing=False)
        self.starting, self.ending = TriangleAttention(pair_width, heads), TriangleAttention(pair_width, heads)
        self.head, self.distance = nn.Linear(width, classes), nn.Linear(pair_width, 1)

    def forward(self, msa: Tensor, pair: Tensor, labels: Tensor) -> Tensor:
        bias = self.pair_bias(self.pair_norm(pair)).permute(0, 3, 1, 2).unsqueeze(1)
        msa = msa + self.row(self.row_norm(msa), bias)
        msa = msa + self.column(self.column_norm(msa).transpose(1, 2)).transpose(1, 2)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer(msa)
        pair = pair + self.outgoing(pair)
        pair = pair + self.incoming(pair)
        pair = pair + self.starting(pair)
        pair = pair + self.ending(pair.transpose(1, 2)).transpose(1, 2)
        pair = pair + self.pair_transition(pair)
        loss = nn.functional.cross_entropy(self.head(msa).flatten(0, 2), labels.flatten())
        total: Tensor = loss + (self.distance(pair + pair.transpose(1, 2)) ** 2).mean()
        return total


def _proteins(batch: int) -> Inputs:
    return {
        "msa": torch.randn(batch, 8, 12, 16),
        "pair": torch.randn(batch, 12, 12, 8),
        "labels": torch.randint(0, 20, (batch, 8, 12)),
    }


ENTRIES = (
    ZooEntry(
        name="evoformer",
        family="plain",
        build=lambda: Evoformer(width=16, pair_width=8, heads=4, classes=20),
        inputs=_proteins,
        batch=1,
    ),
)
