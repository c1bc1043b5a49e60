"""A Mamba-2 layer as a module: what its fused kernels compute, in operators that have prices (arXiv 2405.21060).

    z, x, B, C, dt = in_proj(u)          one product; x, B, C pass a short convolution along the sequence
    inside of a chunk                    y = (C B^T, masked) x: attention without softmax over 128 positions
    between chunks                       states = B^T x, carried on with decay, then C states
    out_proj(norm(y * silu(z)))

B and C are shared by the heads of a group, as keys are. The convolution reads and writes its channels once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.validation.runs import StateSpace

CHUNK = 128
"""Positions of a chunk (megatron/core/ssm/mamba_mixer.py: chunk_size)."""


class Mamba(nn.Module):
    """(batch, sequence, hidden) -> the same."""

    def __init__(self, hidden: int, sizes: StateSpace) -> None:
        super().__init__()
        self.sizes = sizes
        inner, shared = sizes.heads * sizes.head_dim, sizes.groups * sizes.state
        self.widths = [inner, inner + 2 * shared, sizes.heads]
        self.in_proj = nn.Linear(hidden, sum(self.widths), bias=False)
        self.taps = nn.Parameter(torch.empty(sizes.conv, self.widths[1]))
        self.step_bias = nn.Parameter(torch.empty(sizes.heads))
        self.skip = nn.Parameter(torch.empty(sizes.heads, 1))
        self.norm = nn.RMSNorm(inner)
        self.out_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        sizes = self.sizes
        gate, mixed, steps = torch.split(self.in_proj(u), self.widths, dim=-1)
        mixed = F.silu(mixed * self.taps.sum(0))
        shared = sizes.groups * sizes.state
        x, into, out = torch.split(mixed, [self.widths[0], shared, shared], dim=-1)
        steps = F.softplus(steps + self.step_bias)
        values = x.reshape(*x.shape[:2], sizes.heads, sizes.head_dim)
        y = self._scan(values * steps.unsqueeze(-1), self._per_head(into), self._per_head(out), steps)
        y = (y + values * self.skip).flatten(2)
        result: Tensor = self.out_proj(self.norm(y * F.silu(gate)))
        return result

    def _per_head(self, shared: Tensor) -> Tensor:
        """(batch, sequence, groups x state) -> (batch, sequence, heads, state)."""
        sizes = self.sizes
        grouped = shared.reshape(*shared.shape[:2], sizes.groups, 1, sizes.state)
        return grouped.expand(-1, -1, -1, sizes.heads // sizes.groups, -1).flatten(2, 3)

    def _scan(self, x: Tensor, into: Tensor, out: Tensor, steps: Tensor) -> Tensor:
        batch, length, heads, _ = x.shape
        chunk = min(CHUNK, length)
        x, into, out = (_chunked(part, chunk) for part in (x, into, out))
        inside = F.scaled_dot_product_attention(out, into, x, is_causal=True)
        states = into.transpose(-1, -2) @ x
        decay = steps.view(batch * (length // chunk), chunk, heads).sum(1)
        carried = states * decay.exp().unsqueeze(-1).unsqueeze(-1)
        y = inside + out @ carried
        return y.transpose(1, 2).reshape(batch, length, heads, -1)


def _chunked(part: Tensor, chunk: int) -> Tensor:
    """(batch, sequence, heads, width) -> (batch x chunks, heads, chunk, width)."""
    batch, length, heads, width = part.shape
    return part.reshape(batch * (length // chunk), chunk, heads, width).transpose(1, 2)
