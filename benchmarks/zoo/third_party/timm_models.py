"""timm: image classifiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry
from benchmarks.zoo.third_party.without_dropout import without_dropout

PACKAGES = ("timm",)


def _images(side: int) -> Callable[[int], Inputs]:
    return lambda batch: {"x": torch.randn(batch, 3, side, side), "labels": torch.randint(0, 10, (batch,))}


def _cross_entropy(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output, batch["labels"])


def _entry(name: str, side: int = 64, **arguments: Any) -> ZooEntry:
    def build() -> nn.Module:
        model: nn.Module = timm.create_model(name, num_classes=10, **arguments)
        return without_dropout(model)

    return ZooEntry(name=f"timm/{name}", family="vision", build=build, inputs=_images(side), loss_fn=_cross_entropy)


ENTRIES = (
    _entry("resnet10t"),
    _entry("vit_tiny_patch16_224", img_size=64, depth=3),
    _entry("deit3_small_patch16_224", img_size=64, depth=2, embed_dim=96, num_heads=3),
    _entry("cait_xxs24_224", img_size=64, depth=2, embed_dim=96, num_heads=3),
    _entry("xcit_nano_12_p16_224", img_size=64, depth=2, embed_dim=64, num_heads=2),
    _entry("beit_base_patch16_224", img_size=64, depth=2, embed_dim=64, num_heads=2),
    _entry("eva02_tiny_patch14_224", 56, img_size=56, depth=2, embed_dim=96, num_heads=3),
    _entry("mixer_s32_224", img_size=64),
    _entry("gmlp_ti16_224", img_size=64),
    _entry("resmlp_12_224", img_size=64),
    _entry("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)),
    _entry("convnextv2_atto", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)),
    _entry(
        "swin_tiny_patch4_window7_224",
        img_size=64,
        window_size=4,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    _entry(
        "swinv2_cr_tiny_224",
        init_values=0.1,  # with its own, 0, the branches say nothing
        img_size=64,
        window_size=4,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    _entry("twins_pcpvt_small", img_size=64, depths=(1, 1, 1, 1), embed_dims=(16, 32, 40, 64)),
    _entry("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(16, 32, 40, 64)),
    _entry("poolformer_s12"),
    _entry("coat_tiny", img_size=64),
    _entry("crossvit_9_240"),
    _entry("levit_128s", 224),
    _entry("efficientvit_m0"),
    _entry("mobilevit_xxs"),
    _entry("edgenext_xx_small"),
    _entry("mobilenetv2_050"),
    _entry("mobilenetv3_small_050"),
    _entry("efficientnet_lite0"),
    _entry("tinynet_e"),
    _entry("mnasnet_small"),
    _entry("ghostnet_050", drop_rate=0.0),
    _entry("regnetx_002"),
    _entry("regnety_002"),
    _entry("repvgg_a0"),
    _entry("resnext26ts"),
    _entry("skresnet18"),
    _entry("seresnet18"),
    _entry("res2net50_14w_8s"),
    _entry("dla46_c"),
    _entry("hrnet_w18_small"),
    _entry("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    _entry("cspresnet50"),
    _entry("hardcorenas_a"),
    _entry("nf_resnet26"),
    _entry("lambda_resnet26t", img_size=64),
    _entry("botnet26t_256", img_size=64),
    _entry("fastvit_t8"),
    _entry("hgnetv2_b0"),
    _entry("starnet_s1"),
)
