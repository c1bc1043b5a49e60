"""Generative models in plain torch: diffusion transformer, VAE (its noise is an input), tied autoencoder, flow."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry


def timestep_embedding(time: Tensor, width: int) -> Tensor:
    """(B,) -> (B, width): sines and cosines of falling frequency."""
    half = width // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, device=time.device, dtype=time.dtype) / half)
    angles = time[:, None] * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class DiTBlock(nn.Module):
    """Attention and MLP whose norms are shifted, scaled and gated by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        hidden = self.norm1(x) * (1 + scale1) + shift1
        query, key, value = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + gate1 * self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)
        return out


class DiT(nn.Module):
    """forward(images (B, 4, H, W), noise, time (B,), labels (B,)) -> error of the predicted noise."""

    def __init__(self, *, size: int, patch: int, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patch, self.width = patch, width
        self.embed = nn.Conv2d(4, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.final = nn.Linear(width, patch * patch * 4)

    def forward(self, images: Tensor, noise: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        level = torch.cos(time * math.pi / 2)[:, None, None, None]
        noisy = level * images + (1 - level**2).sqrt() * noise
        x = self.embed(noisy).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(timestep_embedding(time, self.width)) + self.label(labels)
        for block in self.blocks:
            x = block(x, condition)
        side, patch = images.shape[-1] // self.patch, self.patch
        predicted = self.final(self.norm(x)).unflatten(1, (side, side)).unflatten(-1, (patch, patch, 4))
        predicted = torch.einsum("nhwpqc->nchpwq", predicted).reshape(noise.shape)
        return functional.mse_loss(predicted, noise)


class Vae(nn.Module):
    """Convolutional VAE; the noise is an input, so the loss is a function. forward(images, noise (B, Z)) -> loss."""

    def __init__(self, channels: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, channels, 4, 2, 1), nn.ReLU(),
                                     nn.Conv2d(channels, 2 * channels, 4, 2, 1), nn.ReLU(), nn.Flatten())  # fmt: skip
        self.mean, self.log_variance = nn.Linear(32 * channels, latent), nn.Linear(32 * channels, latent)
        self.expand = nn.Linear(latent, 32 * channels)
        self.decoder = nn.Sequential(nn.Unflatten(1, (2 * channels, 4, 4)),
                                     nn.ConvTranspose2d(2 * channels, channels, 4, 2, 1), nn.ReLU(),
                                     nn.ConvTranspose2d(channels, 1, 4, 2, 1))  # fmt: skip

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        hidden = self.encoder(images)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        drawn = mean + noise * torch.exp(0.5 * log_variance)
        logits = self.decoder(torch.relu(self.expand(drawn)))
        error = functional.binary_cross_entropy_with_logits(logits, images, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return (error + divergence) / images.shape[0]


class TiedAutoencoder(nn.Module):
    """The decoder is the transposed encoder with its own bias. forward(x (B, F)) -> mean squared error."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(features, hidden)
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        code = torch.sigmoid(self.encoder(x))
        return functional.mse_loss(functional.linear(code, self.encoder.weight.t(), self.bias), x)


class AffineCoupling(nn.Module):
    """RealNVP: half of the features shift and scale the other half; the halves swap from layer to layer."""

    def __init__(self, features: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(features // 2, hidden), nn.LeakyReLU(0.1), nn.Linear(hidden, features))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(x.shape[0])
        for network in self.networks:
            kept, moved = x.chunk(2, dim=-1)
            scale, shift = network(kept).chunk(2, dim=-1)
            scale = torch.tanh(scale)
            x = torch.cat([moved * scale.exp() + shift, kept], dim=-1).flip(-1)
            volume = volume + scale.sum(-1)
        return (0.5 * x.square().sum(-1) - volume).mean()


def _diffusion(batch: int) -> Inputs:
    return {
        "images": torch.randn(batch, 4, 8, 8),
        "noise": torch.randn(batch, 4, 8, 8),
        "time": torch.rand(batch),
        "labels": torch.randint(0, 10, (batch,)),
    }


ENTRIES = (
    ZooEntry(
        name="diffusion_transformer",
        family="plain",
        build=lambda: DiT(size=8, patch=2, width=32, heads=4, layers=2, classes=10),
        inputs=_diffusion,
    ),
    ZooEntry(
        name="vae",
        family="plain",
        build=lambda: Vae(8, latent=6),
        inputs=lambda batch: {"images": torch.rand(batch, 1, 16, 16), "noise": torch.randn(batch, 6)},
    ),
    ZooEntry(
        name="tied_autoencoder",
        family="plain",
        build=lambda: TiedAutoencoder(24, hidden=10),
        inputs=lambda batch: {"x": torch.rand(batch, 24)},
        batch=8,
    ),
    ZooEntry(
        name="normalizing_flow",
        family="plain",
        build=lambda: AffineCoupling(12, hidden=32, layers=4),
        inputs=lambda batch: {"x": torch.randn(batch, 12)},
        batch=6,
    ),
)
