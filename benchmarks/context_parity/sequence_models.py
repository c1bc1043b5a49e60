"""Small models that mix a sequence by other means than attention, or beside it, in fp64.

    model, inputs = FAMILIES["linear attention"](64)      of 64 tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn import functional as F

from benchmarks.context_parity.models import BATCH, VOCABULARY, Case, LossOnly, hugging_face
from benchmarks.zoo.plain_evoformer import Evoformer
from benchmarks.zoo.transformers_tiny import tiny_config

WIDTH, HEADS = 32, 4


class LinearAttention(nn.Module):
    """phi(q) times the running sum of phi(k) v^T, normalised. forward(x (B, T, W)) -> (B, T, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.projected, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)) for part in self.projected(x).chunk(3, -1))
        query, key = F.elu(query) + 1, F.elu(key) + 1
        states = (key.unsqueeze(-1) * value.unsqueeze(-2)).cumsum(1)  # (B, T, H, D, D)
        mixed = (query.unsqueeze(-1) * states).sum(-2) / (query * key.cumsum(1)).sum(-1, keepdim=True)
        out: Tensor = self.out(mixed.flatten(-2))
        return out


class GatedRecurrence(nn.Module):
    """A gated linear recurrence of every channel (RG-LRU, minGRU) by `associative_scan`."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        decay = torch.sigmoid(self.decay(x))
        added = (1 - decay) * self.value(x)
        _, states = associative_scan(_joined, (decay, added), 1, combine_mode="generic")
        out: Tensor = self.out(states)
        return out


def _joined(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return left[0] * right[0], right[0] * left[1] + right[1]


class TimeMixing(nn.Module):
    """RWKV's mixing of a token with the one in front of it, and decayed sums of keys and values (RWKV-5)."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.mixes = nn.Parameter(torch.rand(3, WIDTH))
        self.projected = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.decay, self.out = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        before = self.shift(x)
        key, value, gate = (p(before.lerp(x, mix)) for p, mix in zip(self.projected, self.mixes, strict=True))
        written = torch.stack([key.exp() * value, key.exp()])
        decay = torch.exp(-torch.exp(self.decay)).expand_as(written)
        _, (sums, weights) = associative_scan(_joined, (decay, written), 2, combine_mode="generic")
        out: Tensor = self.out(torch.sigmoid(gate) * sums / weights)
        return out


class Conformer(nn.Module):
    """Self-attention, then a gated depthwise convolution over 7 places."""

    def __init__(self) -> None:
        super().__init__()
        self.projected, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.inner_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.gates, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.projected(x).chunk(3, -1)
        )
        x = x + self.mixed(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2))
        inner = F.glu(self.gates(self.norm(x)), -1)
        inner = self.depthwise(inner.transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.out(F.silu(self.inner_norm(inner)))
        return out


class Hyena(nn.Module):
    """A short causal convolution, then a gated one as long as the sequence, by Fourier transforms (order 2)."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.projected, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.short = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, padding=2, groups=3 * WIDTH)
        self.long = nn.Parameter(torch.randn(WIDTH, tokens) * torch.exp(-torch.arange(tokens) / 4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        first, second, value = self.short(self.projected(x).transpose(1, 2))[..., :tokens].chunk(3, 1)
        spectrum = torch.fft.rfft(first * value, n=2 * tokens) * torch.fft.rfft(self.long, n=2 * tokens)
        mixed = torch.fft.irfft(spectrum, n=2 * tokens)[..., :tokens]
        out: Tensor = self.out((second * mixed).transpose(1, 2))
        return out


class WaveNet(nn.Module):
    """Gated causal convolutions with holes, padded at the front."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**layer) for layer in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.transpose(1, 2)
        for layer, gate in enumerate(self.gates):
            signal, gating = gate(F.pad(mixed, (2**layer, 0))).chunk(2, 1)
            mixed = mixed + torch.tanh(signal) * torch.sigmoid(gating)
        return mixed.transpose(1, 2)


class BothWays(nn.Module):
    """A running sum from the front and one from the end, of which the second is flipped."""

    def __init__(self) -> None:
        super().__init__()
        self.forth, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.forth(x).cumsum(1) + self.back(x.flip(1)).cumsum(1).flip(1)
        return out / x.shape[1]


class Tagger(nn.Module):
    """Embedding, blocks of a mixer with a residual, a head over the next token. forward(ids (B, T)) -> loss."""

    def __init__(self, mixers: list[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.mixers = nn.ModuleList(mixers)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in mixers)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids[:, :-1])
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            hidden = hidden + mixer(norm(hidden))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids[:, 1:].flatten())


def _tagger(mixer: Callable[[], nn.Module], tokens: int, layers: int = 2) -> Case:
    torch.manual_seed(0)
    model = Tagger([mixer() for _ in range(layers)]).double()
    return model, {"ids": torch.randint(0, VOCABULARY, (BATCH, tokens + 1))}


def _hyena(tokens: int) -> Case:
    return _tagger(partial(Hyena, tokens), tokens)


def _rwkv(tokens: int) -> Case:
    """RWKV-4 as transformers has it: a loop over the tokens."""
    torch.manual_seed(0)
    config = tiny_config(transformers.RwkvConfig, attention_hidden_size=32)
    ids = torch.randint(3, VOCABULARY, (BATCH, tokens))
    return LossOnly(transformers.RwkvForCausalLM(config).double().train()), {"input_ids": ids, "labels": ids}


def _evoformer(tokens: int) -> Case:
    """As many residues as tokens, half as many sequences."""
    torch.manual_seed(0)
    return Evoformer(width=32, pair_width=32, heads=4, classes=20).double(), {
        "msa": torch.randn(1, tokens // 2, tokens, 32, dtype=torch.float64),
        "pair": torch.randn(1, tokens, tokens, 32, dtype=torch.float64),
        "labels": torch.randint(0, 20, (1, tokens // 2, tokens)),
    }


def _of_transformers(name: str, **changes: Any) -> Callable[[int], Case]:
    return lambda tokens: hugging_face(name, tokens, **changes)()


def _mamba2(tokens: int) -> Case:
    return hugging_face(
        "Mamba2ForCausalLM", tokens, num_heads=8, head_dim=8, n_groups=2, chunk_size=_chunk(tokens)
    )()


def _bamba(tokens: int) -> Case:
    """A layer of Mamba-2, then one of attention."""
    chunk = _chunk(tokens)
    return hugging_face(
        "BambaForCausalLM", tokens, attn_layer_indices=[1], mamba_n_heads=8, mamba_n_groups=2, mamba_chunk_size=chunk
    )()


def _chunk(tokens: int) -> int:
    """8 tokens, or 32 chunks of long sequences."""
    return max(8, tokens // 32)


FAMILIES: Mapping[str, Callable[[int], Case]] = {
    "mamba2": _mamba2,
    "bamba": _bamba,
    "mamba": _of_transformers("MambaForCausalLM"),
    "rwkv": _rwkv,
    "time mixing": partial(_tagger, TimeMixing),
    "linear attention": partial(_tagger, LinearAttention),
    "gated recurrence": partial(_tagger, GatedRecurrence),
    "both ways": partial(_tagger, BothWays),
    "conformer": partial(_tagger, Conformer),
    "hyena": _hyena,
    "wavenet": partial(_tagger, WaveNet),
    "t5": _of_transformers("T5ForConditionalGeneration", decoder_start_token_id=0),
    "evoformer": _evoformer,
}
"""Name -> model and inputs of so many tokens."""
