"""Sequences in plain torch: GPT, stock nn.Transformer, LSTM and GRU, WaveNet, a selective scan, Perceiver, soft MoE."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.demo.gpt import GPT, GPTConfig
from benchmarks.zoo.registry import Inputs, ZooEntry

VOCABULARY = 48


class TransformerSeq2Seq(nn.Module):
    """Stock `nn.Transformer`. forward(source (B, S), target (B, T), labels (B, T)) -> loss."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 32, width))
        self.transformer = nn.Transformer(width, heads, 1, 1, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.positions.dtype)
        encoded, decoded = self._embed(source), self._embed(target)
        hidden = self.transformer(encoded, decoded, tgt_mask=mask, src_key_padding_mask=source == 0)
        return functional.cross_entropy(self.head(hidden).transpose(1, 2), labels)

    def _embed(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.embedding(tokens) + self.positions[:, : tokens.shape[1]]
        return out


class LstmSeq2Seq(nn.Module):
    """LSTM encoder whose state starts an LSTM decoder. forward(source, target, labels) -> loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, width)
        self.target = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.LSTM(width, width, layers, batch_first=True)
        self.decoder = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        _, state = self.encoder(self.source(source))
        hidden, _ = self.decoder(self.target(target), state)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class GruClassifier(nn.Module):
    """Bidirectional GRU, mean and last state. forward(tokens (B, S), labels (B,)) -> loss."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, last = self.gru(self.embedding(tokens))
        pooled = torch.cat([hidden.mean(1), last[0], last[1]], dim=-1)
        return functional.cross_entropy(self.head(pooled), labels)


class WaveNet(nn.Module):
    """Dilated causal convolutions, gated, with skip connections. forward(samples (B, T) of codes) -> loss."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, channels)
        self.dilations = [2**layer for layer in range(layers)]
        self.gates = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 2, dilation=d) for d in self.dilations)
        self.residuals = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in self.dilations)
        self.skips = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in self.dilations)
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(channels, channels, 1), nn.ReLU(),
                                  nn.Conv1d(channels, VOCABULARY, 1))  # fmt: skip

    def forward(self, samples: Tensor) -> Tensor:
        x = self.embedding(samples[:, :-1]).transpose(1, 2)
        total: Tensor | float = 0.0
        for dilation, gate, residual, skip in zip(self.dilations, self.gates, self.residuals, self.skips, strict=True):
            signal, gating = gate(functional.pad(x, (dilation, 0))).chunk(2, dim=1)
            hidden = torch.tanh(signal) * torch.sigmoid(gating)
            total = total + skip(hidden)
            x = x + residual(hidden)
        return functional.cross_entropy(self.head(total), samples[:, 1:])


class SelectiveScan(nn.Module):
    """One Mamba-like layer, its recurrence as a loop. forward(tokens, labels (B, S)) -> loss."""

    def __init__(self, width: int, state: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 2 * width)
        self.step = nn.Linear(width, width)
        self.write, self.read = nn.Linear(width, state, bias=False), nn.Linear(width, state, bias=False)
        self.decay = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        u, gate = self.project(self.norm(x)).chunk(2, dim=-1)
        u = functional.silu(u)
        step = functional.softplus(self.step(u))  # (B, S, W)
        decay = torch.exp(-step.unsqueeze(-1) * torch.exp(self.decay))  # (B, S, W, N)
        written = (step * u).unsqueeze(-1) * self.write(u).unsqueeze(2)
        state = torch.zeros_like(decay[:, 0])
        outputs = []
        read = self.read(u)
        for time in range(tokens.shape[1]):
            state = decay[:, time] * state + written[:, time]
            outputs.append((state * read[:, time].unsqueeze(1)).sum(-1))
        y = torch.stack(outputs, dim=1) + self.skip * u
        x = x + self.out(y * functional.silu(gate))
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class CumulativeScan(nn.Module):
    """A linear recurrence with data-dependent decay, solved by cumulative sums. forward(tokens, labels) -> loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.value, self.gate, self.decay = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        total = functional.logsigmoid(self.decay(x)).cumsum(dim=1)
        mixed = torch.exp(total) * (torch.exp(-total) * self.value(x)).cumsum(dim=1)
        x = x + self.norm(mixed) * torch.sigmoid(self.gate(x))
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Perceiver(nn.Module):
    """Learned latents attend to the input, then to themselves. forward(points (B, N, 6), labels (B,)) -> loss."""

    def __init__(self, *, latents: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(0.02 * torch.randn(latents, width))
        self.project = nn.Linear(6, width)
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True)
        self.own = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, classes)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        data = self.project(points)
        x = self.latents.unsqueeze(0).expand(points.shape[0], -1, -1)
        x = x + self.cross(self.norms[0](x), data, data, need_weights=False)[0]
        query = self.norms[1](x)
        x = x + self.own(query, query, query)[0]
        x = x + self.mlp(self.norms[2](x))
        return functional.cross_entropy(self.head(x.mean(dim=1)), labels)


class SoftExperts(nn.Module):
    """Every expert sees every token; a softmax gate mixes them. forward(x (B, S, W), target) -> mean squared error."""

    def __init__(self, *, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        hidden = functional.gelu(torch.einsum("bsd,edh->ebsh", x, self.up))
        mixed = torch.einsum("ebsh,ehd,bse->bsd", hidden, self.down, weights)
        load = weights.mean((0, 1))
        loss: Tensor = functional.mse_loss(x + mixed, target) + 0.01 * (load * load).sum()
        return loss


def _translation(batch: int) -> Inputs:
    source = torch.randint(1, VOCABULARY, (batch, 12))
    source[:, 9:] = torch.where(torch.arange(batch).unsqueeze(1) % 2 == 0, 0, source[:, 9:])
    target = torch.randint(1, VOCABULARY, (batch, 11))
    return {"source": source, "target": target[:, :-1], "labels": target[:, 1:]}


def _tokens(batch: int) -> Inputs:
    return {"tokens": torch.randint(0, VOCABULARY, (batch, 12)), "labels": torch.randint(0, VOCABULARY, (batch, 12))}


def _classified(batch: int) -> Inputs:
    return {"tokens": torch.randint(0, VOCABULARY, (batch, 12)), "labels": torch.randint(0, 8, (batch,))}


ENTRIES = (
    ZooEntry(
        name="gpt",
        family="plain",
        build=lambda: GPT(GPTConfig(vocabulary=VOCABULARY, positions=16, width=32, heads=4, layers=2)),
        inputs=_tokens,
    ),
    ZooEntry(
        name="transformer_seq2seq", family="plain", build=lambda: TransformerSeq2Seq(32, heads=4), inputs=_translation
    ),
    ZooEntry(name="lstm_seq2seq", family="plain", build=lambda: LstmSeq2Seq(16, layers=2), inputs=_translation),
    ZooEntry(name="gru_classifier", family="plain", build=lambda: GruClassifier(16, classes=8), inputs=_classified),
    ZooEntry(
        name="wavenet",
        family="plain",
        build=lambda: WaveNet(16, layers=4),
        inputs=lambda batch: {"samples": torch.randint(0, VOCABULARY, (batch, 33))},
    ),
    ZooEntry(name="selective_scan", family="plain", build=lambda: SelectiveScan(16, state=4), inputs=_tokens),
    ZooEntry(name="cumulative_scan", family="plain", build=lambda: CumulativeScan(16), inputs=_tokens),
    ZooEntry(
        name="perceiver",
        family="plain",
        build=lambda: Perceiver(latents=6, width=32, heads=4, classes=8),
        inputs=lambda batch: {"points": torch.randn(batch, 20, 6), "labels": torch.randint(0, 8, (batch,))},
    ),
    ZooEntry(
        name="soft_experts",
        family="plain",
        build=lambda: SoftExperts(experts=4, width=16, hidden=24),
        inputs=lambda batch: {"x": torch.randn(batch, 10, 16), "target": torch.randn(batch, 10, 16)},
    ),
)
