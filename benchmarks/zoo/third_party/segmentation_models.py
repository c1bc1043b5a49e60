"""segmentation-models-pytorch: encoders and decoders of dense prediction."""

from __future__ import annotations

from typing import Any

import segmentation_models_pytorch as smp
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry
from benchmarks.zoo.third_party.without_dropout import without_dropout

PACKAGES = ("segmentation_models_pytorch", "timm")


def _pixels(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output, batch["labels"])


def _entry(name: str, encoder: str = "resnet18", side: int = 64, **arguments: Any) -> ZooEntry:
    def build() -> nn.Module:
        model: nn.Module = smp.create_model(name, encoder_name=encoder, encoder_weights=None, classes=4, **arguments)
        return without_dropout(model)

    return ZooEntry(
        name=f"segmentation_models_pytorch/{name}",
        family="segmentation",
        build=build,
        inputs=lambda batch: {
            "x": torch.randn(batch, 3, side, side),
            "labels": torch.randint(0, 4, (batch, side, side)),
        },
        loss_fn=_pixels,
    )


ENTRIES = (
    _entry("unet"),
    _entry("unetplusplus"),
    _entry("linknet"),
    _entry("fpn", decoder_dropout=0.0),
    _entry("pspnet", psp_dropout=0.0),
    _entry("pan", side=256),
    _entry("manet"),
    _entry("deeplabv3"),
    _entry("deeplabv3plus"),
    _entry("upernet"),
    _entry("segformer", encoder="mit_b0"),
)
