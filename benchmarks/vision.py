"""Vision in plain torch: a residual network with BatchNorm, and a U-Net whose skips reach over the whole graph."""

from __future__ import annotations

import itertools

import torch
from torch import nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm beside a (projected) shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class ResNet(nn.Module):
    """`blocks[i]` residual blocks of width * 2**i channels. forward(images (B, 3, H, W), labels (B,)) -> loss."""

    def __init__(self, *, width: int, blocks: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        channels = [width * 2**stage for stage in range(len(blocks))]
        layers = [
            ResidualBlock(
                channels[max(stage - 1, 0)] if block == 0 else channels[stage],
                channels[stage],
                2 if block == 0 and stage else 1,
            )
            for stage, count in enumerate(blocks)
            for block in range(count)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(torch.relu(self.norm(self.stem(images))))
        return nn.functional.cross_entropy(self.head(hidden.mean((2, 3))), labels)


def _double_convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out):
        layers += [nn.Conv2d(channels, channels_out, 3, padding=1), nn.GroupNorm(32, channels_out), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """One level per entry of `channels`, two convolutions each, halving the image from level to level; every level
    hands its output to the way back. forward(images (B, 3, H, W), masks (B, H, W)) -> loss."""

    def __init__(self, *, channels: tuple[int, ...], classes: int) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(channels))
        self.stem = _double_convolution(3, channels[0])
        self.down = nn.ModuleList(_double_convolution(above, below) for above, below in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(below, above, 2, 2) for above, below in reversed(pairs))
        self.merge = nn.ModuleList(_double_convolution(2 * above, above) for above, _ in reversed(pairs))
        self.head = nn.Conv2d(channels[0], classes, 1)

    def forward(self, images: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        skips = []
        for level in self.down:
            skips.append(hidden)
            hidden = level(nn.functional.max_pool2d(hidden, 2))
        for widen, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            hidden = merge(torch.cat([skip, widen(hidden)], dim=1))
        return nn.functional.cross_entropy(self.head(hidden), masks)
