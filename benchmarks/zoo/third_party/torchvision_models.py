"""torchvision: classifiers, segmentation, video and optical flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.optical_flow import raft
from torchvision.models.optical_flow._utils import make_coords_grid

from benchmarks.zoo.registry import Inputs, ZooEntry
from benchmarks.zoo.third_party.without_dropout import without_dropout

PACKAGES = ("torchvision",)


def _build(name: str, **arguments: Any) -> nn.Module:
    return without_dropout(torchvision.models.get_model(name, weights=None, **arguments))


def _images(*sizes: int) -> Callable[[int], Inputs]:
    return lambda batch: {"x": torch.randn(batch, 3, *sizes), "labels": torch.randint(0, 10, (batch,))}


def _cross_entropy(output: Any, batch: Inputs) -> Tensor:
    """Of all heads, where a model trains more than one."""
    heads = [output] if isinstance(output, Tensor) else [head for head in output if isinstance(head, Tensor)]
    return torch.stack([functional.cross_entropy(head, batch["labels"]) for head in heads]).sum()


def _classifier(name: str, *sizes: int, **arguments: Any) -> ZooEntry:
    return ZooEntry(
        name=f"torchvision/{name}",
        family="vision",
        build=lambda: _build(name, num_classes=10, **arguments),
        inputs=_images(*(sizes or (64, 64))),
        loss_fn=_cross_entropy,
    )


def _video(name: str, frames: int, side: int, **arguments: Any) -> ZooEntry:
    return _classifier(name, frames, side, side, **arguments)


def _pixels(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output["out"], batch["labels"])


def _segmentation(name: str, argument: str = "x", side: int = 64) -> ZooEntry:
    return ZooEntry(
        name=f"torchvision/{name}",
        family="segmentation",
        build=lambda: _build(name, num_classes=5, weights_backbone=None),
        inputs=lambda batch: {
            argument: torch.randn(batch, 3, side, side), "labels": torch.randint(0, 5, (batch, side, side))
        },
        loss_fn=_pixels,
    )  # fmt: skip


def _flow(output: Any, batch: Inputs) -> Tensor:
    """The mean distance to the true flow, later estimates weighing more."""
    errors = [(estimate - batch["flow"]).abs().mean() for estimate in output]
    return torch.stack([0.8 ** (len(errors) - i - 1) * error for i, error in enumerate(errors)]).sum()


def _raft() -> nn.Module:
    """Its coordinates are fp32 whatever its inputs are; here they are fp64, as is the model."""
    raft.make_coords_grid = lambda *sizes: make_coords_grid(*sizes).double()
    return _build("raft_small")


ENTRIES = (
    _classifier("alexnet", dropout=0.0),
    _classifier("vgg11_bn", dropout=0.0),
    _classifier("resnet18"),
    _classifier("resnext50_32x4d"),
    _classifier("wide_resnet50_2"),
    _classifier("densenet121"),
    _classifier("googlenet", aux_logits=False, init_weights=False, dropout=0.0),
    _classifier("inception_v3", 80, 80, aux_logits=False, init_weights=False, dropout=0.0),
    _classifier("mnasnet0_5", dropout=0.0),
    _classifier("mobilenet_v2", width_mult=0.5, dropout=0.0),
    _classifier("mobilenet_v3_small", dropout=0.0),
    _classifier("shufflenet_v2_x0_5"),
    _classifier("squeezenet1_1", dropout=0.0),
    _classifier("regnet_x_400mf"),
    _classifier("regnet_y_400mf"),
    _classifier("efficientnet_b0", dropout=0.0),
    _classifier("efficientnet_v2_s", dropout=0.0),
    _classifier("convnext_tiny"),
    _classifier("vit_b_16", image_size=64),
    _classifier("swin_t"),
    _classifier("swin_v2_t"),
    _classifier("maxvit_t", 224, 224),
    _segmentation("fcn_resnet50"),
    _segmentation("deeplabv3_mobilenet_v3_large"),
    _segmentation("lraspp_mobilenet_v3_large", "input"),
    _video("r3d_18", 4, 32),
    _video("mc3_18", 4, 32),
    _video("r2plus1d_18", 4, 32),
    _video("swin3d_t", 4, 32),
    ZooEntry(
        name="torchvision/raft_small",
        family="vision",
        build=_raft,
        inputs=lambda batch: {
            "image1": torch.randn(batch, 3, 128, 128),
            "image2": torch.randn(batch, 3, 128, 128),
            "flow": torch.randn(batch, 2, 128, 128),
        },
        batch=2,
        loss_fn=_flow,
        dtype=torch.float64,
    ),
)
