"""denoising-diffusion-pytorch: denoisers, which are given the noise and the step that the package would draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from denoising_diffusion_pytorch import Unet, Unet1D
from denoising_diffusion_pytorch.karras_unet import KarrasUnet
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("denoising_diffusion_pytorch", "accelerate")


def _noise(output: Any, batch: Inputs) -> Tensor:
    return functional.mse_loss(output, batch["noise"])


def _entry(name: str, build: Callable[[], nn.Module], shape: tuple[int, ...]) -> ZooEntry:
    return ZooEntry(
        name=f"denoising_diffusion_pytorch/{name}",
        family="diffusion",
        build=build,
        inputs=lambda batch: {
            "x": torch.randn(batch, *shape), "time": torch.rand(batch), "noise": torch.randn(batch, *shape)
        },
        loss_fn=_noise,
    )  # fmt: skip


ENTRIES = (
    _entry("unet", lambda: Unet(dim=16, dim_mults=(1, 2), flash_attn=False), (3, 16, 16)),
    _entry("unet_flash", lambda: Unet(dim=16, dim_mults=(1, 2), flash_attn=True), (3, 16, 16)),
    _entry("unet_1d", lambda: Unet1D(dim=16, dim_mults=(1, 2), channels=4), (4, 32)),
    _entry(
        "karras_unet",
        lambda: KarrasUnet(image_size=16, dim=16, dim_max=32, num_downsamples=2, num_blocks_per_stage=1, channels=3,
                           fourier_dim=8, attn_dim_head=8, attn_res=(8,), dropout=0.0),
        (3, 16, 16),
    ),
)  # fmt: skip
