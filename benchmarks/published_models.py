"""The models of Alpa's benchmarks beside GPT, in plain torch: a mixture of experts as in GShard, and Wide-ResNet.

    GShard        every second layer has experts of 8 * width hidden units; a token goes to the two best of them, as far
                  as they have room: 2 * tokens / experts places each. Dispatch and combine are products with masks
    WideResNet    50 layers: 16 residual blocks of three convolutions in four levels

Two differences from Alpa's own: experts fill up per sequence of 1024 tokens, not per 2048 tokens of two of them; and
norms of Wide-ResNet are over groups of channels, since those over the batch do not come out the same in micro-batches.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, max_pool2d, relu, scaled_dot_product_attention

WIDER = 8
"""Hidden units per unit of width, of experts and of dense layers."""
NORM_GROUPS = 32
LEVELS = (3, 4, 6, 3)
"""Residual blocks of 50 layers."""


class Attention(nn.Module):
    """x (B, S, M) -> (B, S, M), every token sees all."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        split = (
            part(x).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        mixed: torch.Tensor = self.out(scaled_dot_product_attention(*split).transpose(1, 2).reshape(x.shape))
        return mixed


class Dense(nn.Module):
    """x (B, S, M) -> (B, S, M)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, WIDER * width), nn.Linear(WIDER * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(gelu(self.up(x)))
        return out


class Experts(nn.Module):
    """x (B, S, M) -> (B, S, M): each token through the two best of E experts; what finds no place adds nothing."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, WIDER * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, WIDER * width, width) / (WIDER * width) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        combine = places(torch.softmax(self.gate(x).float(), -1), 2 * x.shape[1] // self.experts).to(x.dtype)
        given = torch.einsum("bsec,bsm->ebcm", (combine != 0).to(x.dtype), x)
        hidden = relu(torch.einsum("ebcm,emh->ebch", given, self.up))
        made = torch.einsum("ebch,ehm->ebcm", hidden, self.down)
        return torch.einsum("bsec,ebcm->bsm", combine, made)


def places(gates: torch.Tensor, capacity: int) -> torch.Tensor:
    """Gates (B, S, E) -> (B, S, E, capacity): the weight with which a token counts, at its place in its expert's list.

    First choices take their places before second ones; the two weights of a token add up to 1 unless one is left out.
    """
    numbers = torch.arange(gates.shape[-1], device=gates.device)
    first = (numbers == gates.argmax(-1, keepdim=True)).to(gates.dtype)
    second = (numbers == (gates * (1 - first)).argmax(-1, keepdim=True)).to(gates.dtype)
    rank_of_first = first.cumsum(1) - first
    first = first * (rank_of_first < capacity)
    rank_of_second = second.cumsum(1) - second + first.sum(1, keepdim=True)
    second = second * (rank_of_second < capacity)
    weights = gates * (first + second)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(gates.dtype).tiny)
    rank = (rank_of_first * first + rank_of_second * second).unsqueeze(-1)
    return weights.unsqueeze(-1) * (rank == torch.arange(capacity, device=gates.device))


class Layer(nn.Module):
    """Attention and experts (or a dense part), each with a sum and a norm behind it."""

    def __init__(self, width: int, heads: int, experts: int | None) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads), nn.LayerNorm(width)
        self.mlp = Dense(width) if experts is None else Experts(width, experts)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x))
        out: torch.Tensor = self.norm2(x + self.mlp(x))
        return out


class GShard(nn.Module):
    """forward(input_ids (B, S), labels (B, S)) -> loss. Input and output embedding are one parameter."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, positions: int, experts: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            *(Layer(width, heads, experts if number % 2 == 0 else None) for number in range(layers))
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.layers(self.norm(self.tokens(input_ids) + self.positions(places)))
        logits = hidden @ self.tokens.weight.T
        return cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Bottleneck(nn.Module):
    """Three convolutions, the middle one `widening` times as wide, beside a (projected) shortcut."""

    def __init__(self, given: int, channels: int, widening: int, stride: int) -> None:
        super().__init__()
        wide, made = widening * channels, 4 * channels
        self.convs = nn.Sequential(
            *_convolution(given, channels, 1, 1), nn.ReLU(), *_convolution(channels, wide, 3, stride), nn.ReLU()
        )
        self.last = nn.Sequential(*_convolution(wide, made, 1, 1))
        same = given == made and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(given, made, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return relu(self.shortcut(x) + self.last(self.convs(x)))


def _convolution(given: int, made: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(given, made, size, stride, padding=size // 2, bias=False), nn.GroupNorm(NORM_GROUPS, made)


class WideResNet(nn.Module):
    """forward(pixel_values (B, 3, H, W), labels (B,)) -> loss."""

    def __init__(self, *, channels: int, widening: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, channels, 7, 2), nn.ReLU())
        blocks: list[nn.Module] = []
        given = channels
        for level, count in enumerate(LEVELS):
            made = channels * 2**level
            for number in range(count):
                blocks.append(Bottleneck(given, made, widening, 2 if level and not number else 1))
                given = 4 * made
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(given, classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(max_pool2d(self.stem(pixel_values), 3, 2, padding=1))
        return cross_entropy(self.head(hidden.mean((2, 3))), labels)
