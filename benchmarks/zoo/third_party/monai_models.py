"""MONAI: segmentation of volumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from monai.networks.nets import (
    UNETR,
    AttentionUnet,
    DenseNet121,
    DynUNet,
    HighResNet,
    SegResNet,
    SwinUNETR,
    UNet,
    VNet,
)
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry
from benchmarks.zoo.third_party.without_dropout import without_dropout

PACKAGES = ("monai",)


def _voxels(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output, batch["labels"])


def _entry(
    name: str, build: Callable[[], nn.Module], shape: tuple[int, int, int] = (32, 32, 32), argument: str = "x"
) -> ZooEntry:
    return ZooEntry(
        name=f"monai/{name}",
        family="segmentation",
        build=build,
        inputs=lambda batch: {
            argument: torch.randn(batch, 1, *shape),
            "labels": torch.randint(0, 3, (batch, *shape)),
        },
        batch=2,
        loss_fn=_voxels,
    )


_SIZES: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 3}
ENTRIES = (
    _entry("unet", lambda: UNet(**_SIZES, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)),
    _entry("attention_unet", lambda: AttentionUnet(**_SIZES, channels=(8, 16, 32), strides=(2, 2))),
    _entry("segresnet", lambda: SegResNet(**_SIZES, init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1))),
    _entry(
        "unetr",
        lambda: UNETR(
            in_channels=1, out_channels=3, img_size=32, feature_size=8, hidden_size=48, mlp_dim=96, num_heads=4
        ),
        argument="x_in",
    ),
    _entry(
        "swin_unetr",
        lambda: SwinUNETR(in_channels=1, out_channels=3, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4)),
        shape=(64, 32, 32),  # more than one voxel is left at the bottom
        argument="x_in",
    ),
    _entry("vnet", lambda: without_dropout(VNet(**_SIZES)), shape=(32, 16, 16)),
    _entry(
        "dynunet",
        lambda: DynUNet(
            **_SIZES, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[8, 16, 32]
        ),
    ),
    _entry("highresnet", lambda: HighResNet(**_SIZES), shape=(16, 16, 16)),
    ZooEntry(
        name="monai/densenet_3d",
        family="vision",
        build=lambda: DenseNet121(**_SIZES, init_features=16, growth_rate=8, block_config=(2, 2, 2)),
        inputs=lambda batch: {"x": torch.randn(batch, 1, 32, 32, 32), "labels": torch.randint(0, 3, (batch,))},
        loss_fn=_voxels,
    ),
)
