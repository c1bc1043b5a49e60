"""Vision in plain torch: ConvNeXt, U-Net, MLP-Mixer, a feature pyramid with GroupNorm, a 3-D convolutional network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry


class ChannelsLastNorm(nn.Module):
    """LayerNorm over the channels of (B, C, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return out


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7 convolution, LayerNorm, two pointwise layers, layer scale, residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(1e-1 * torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.depthwise(x).permute(0, 2, 3, 1)
        hidden = self.scale * self.down(functional.gelu(self.up(self.norm(hidden))))
        out: Tensor = x + hidden.permute(0, 3, 1, 2)
        return out


class ConvNeXt(nn.Module):
    """forward(images (B, 3, H, W), labels (B,)) -> loss."""

    def __init__(self, channels: tuple[int, ...], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, channels[0], 4, 4), ChannelsLastNorm(channels[0])]
        for before, after in zip((channels[0], *channels), channels, strict=False):
            if before != after:
                layers += [ChannelsLastNorm(before), nn.Conv2d(before, after, 2, 2)]
            layers.append(ConvNeXtBlock(after))
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(channels[-1])
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        pooled = self.layers(images).mean((-2, -1))
        return functional.cross_entropy(self.head(self.norm(pooled)), labels)


def _double_convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, 3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Two levels down by max pooling, two up by transposed convolution. forward(images, masks (B, H, W)) -> loss."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.down1 = _double_convolution(3, channels)
        self.down2 = _double_convolution(channels, 2 * channels)
        self.bottom = _double_convolution(2 * channels, 4 * channels)
        self.up2 = nn.ConvTranspose2d(4 * channels, 2 * channels, 2, 2)
        self.merge2 = _double_convolution(4 * channels, 2 * channels)
        self.up1 = nn.ConvTranspose2d(2 * channels, channels, 2, 2)
        self.merge1 = _double_convolution(2 * channels, channels)
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        first = self.down1(images)
        second = self.down2(functional.max_pool2d(first, 2))
        bottom = self.bottom(functional.max_pool2d(second, 2))
        hidden = self.merge2(torch.cat([second, self.up2(bottom)], dim=1))
        hidden = self.merge1(torch.cat([first, self.up1(hidden)], dim=1))
        return functional.cross_entropy(self.head(hidden), masks)


class MixerBlock(nn.Module):
    """An MLP over the patches, then one over the channels."""

    def __init__(self, patches: int, width: int, hidden: int) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, hidden), nn.GELU(), nn.Linear(hidden, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channels(self.channel_norm(x))
        return out


class Mixer(nn.Module):
    """MLP-Mixer. forward(images (B, 3, H, W), labels (B,)) -> loss."""

    def __init__(self, *, size: int, patch: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(MixerBlock((size // patch) ** 2, width, 2 * width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        return functional.cross_entropy(self.head(self.norm(self.blocks(x)).mean(1)), labels)


class Pyramid(nn.Module):
    """Feature pyramid for segmentation, GroupNorm and bilinear upsampling. forward(images, masks (B, H, W)) -> loss."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        widths = (channels, 2 * channels, 4 * channels)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, 2, padding=1), nn.GroupNorm(4, after), nn.SiLU())
            for before, after in zip((3, *widths), widths, strict=False)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in widths)
        self.smooth = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.SiLU())
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        features = []
        x = images
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        merged = self.lateral[-1](features[-1])
        for lateral, feature in zip(reversed(self.lateral[:-1]), reversed(features[:-1]), strict=True):
            merged = functional.interpolate(merged, size=feature.shape[-2:], mode="bilinear", align_corners=False)
            merged = merged + lateral(feature)
        logits = self.head(self.smooth(merged))
        logits = functional.interpolate(logits, size=masks.shape[-2:], mode="bilinear", align_corners=False)
        return functional.cross_entropy(logits, masks, ignore_index=255)


class VideoNet(nn.Module):
    """3-D convolutions with BatchNorm and pooling. forward(clips (B, 3, T, H, W), labels (B,)) -> loss."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(3, channels, (3, 5, 5), stride=(1, 2, 2), padding=(1, 2, 2), bias=False)
        self.norm1 = nn.BatchNorm3d(channels)
        self.conv2 = nn.Conv3d(channels, 2 * channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm3d(2 * channels)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, clips: Tensor, labels: Tensor) -> Tensor:
        x = functional.max_pool3d(torch.relu(self.norm1(self.conv1(clips))), 2)
        x = torch.relu(self.norm2(self.conv2(x)))
        return functional.cross_entropy(self.head(functional.adaptive_avg_pool3d(x, 1).flatten(1)), labels)


def _images(batch: int) -> Inputs:
    return {"images": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 8, (batch,))}


def _segmentation(batch: int) -> Inputs:
    return {"images": torch.randn(batch, 3, 16, 16), "masks": torch.randint(0, 5, (batch, 16, 16))}


def _partly_ignored(batch: int) -> Inputs:
    inputs = _segmentation(batch)
    return {**inputs, "masks": inputs["masks"].masked_fill(torch.rand(batch, 16, 16) < 0.2, 255)}


def _clips(batch: int) -> Inputs:
    return {"clips": torch.randn(batch, 3, 4, 12, 12), "labels": torch.randint(0, 8, (batch,))}


ENTRIES = (
    ZooEntry(name="convnext", family="plain", build=lambda: ConvNeXt((16, 32), classes=8), inputs=_images),
    ZooEntry(name="unet", family="plain", build=lambda: UNet(8, classes=5), inputs=_segmentation),
    ZooEntry(
        name="mlp_mixer",
        family="plain",
        build=lambda: Mixer(size=16, patch=4, width=32, layers=2, classes=8),
        inputs=_images,
    ),
    ZooEntry(name="fpn_segmentation", family="plain", build=lambda: Pyramid(8, classes=5), inputs=_partly_ignored),
    ZooEntry(name="video_conv3d", family="plain", build=lambda: VideoNet(8, classes=8), inputs=_clips),
)
