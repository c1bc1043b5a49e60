"""vit-pytorch: vision transformers of many papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vit_pytorch import ViT
from vit_pytorch.cait import CaiT
from vit_pytorch.cct import CCT
from vit_pytorch.cross_vit import CrossViT
from vit_pytorch.cvt import CvT
from vit_pytorch.deepvit import DeepViT
from vit_pytorch.levit import LeViT
from vit_pytorch.max_vit import MaxViT
from vit_pytorch.mobile_vit import MobileViT
from vit_pytorch.parallel_vit import ViT as ParallelViT
from vit_pytorch.pit import PiT
from vit_pytorch.regionvit import RegionViT
from vit_pytorch.simple_vit import SimpleViT
from vit_pytorch.t2t import T2TViT
from vit_pytorch.twins_svt import TwinsSVT
from vit_pytorch.vit_3d import ViT as VideoViT
from vit_pytorch.vit_for_small_dataset import ViT as SmallDatasetViT

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("vit_pytorch",)
_PLAIN = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}


def _cross_entropy(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output, batch["labels"])


def _entry(
    name: str, build: Callable[[], nn.Module], argument: str = "img", shape: tuple[int, ...] = (3, 32, 32)
) -> ZooEntry:
    return ZooEntry(
        name=f"vit_pytorch/{name}",
        family="vision",
        build=build,
        inputs=lambda batch: {argument: torch.randn(batch, *shape), "labels": torch.randint(0, 10, (batch,))},
        loss_fn=_cross_entropy,
    )


ENTRIES = (
    _entry("vit", lambda: ViT(**_PLAIN)),
    _entry("simple_vit", lambda: SimpleViT(**_PLAIN)),
    _entry("deepvit", lambda: DeepViT(**_PLAIN)),
    _entry("parallel_vit", lambda: ParallelViT(**_PLAIN, num_parallel_branches=2)),
    _entry("small_dataset", lambda: SmallDatasetViT(**_PLAIN)),
    _entry("cait", lambda: CaiT(**_PLAIN, cls_depth=1)),
    _entry("pit", lambda: PiT(**{**_PLAIN, "depth": (1, 1)})),
    _entry(
        "t2t",
        lambda: T2TViT(dim=32, image_size=32, depth=2, heads=2, mlp_dim=64, num_classes=10,
                       t2t_layers=((7, 4), (3, 2))),
    ),
    _entry(
        "cct",
        lambda: CCT(
            img_size=32, embedding_dim=32, n_conv_layers=1, kernel_size=7, stride=2, padding=3, pooling_kernel_size=3,
            pooling_stride=2, pooling_padding=1, num_layers=2, num_heads=2, mlp_ratio=2.0, num_classes=10,
            positional_embedding="learnable", dropout_rate=0.0, attention_dropout=0.0, stochastic_depth_rate=0.0,
        ),
        "x",
    ),
    _entry(
        "cross_vit",
        lambda: CrossViT(
            image_size=32, num_classes=10, sm_dim=16, lg_dim=32, depth=1, sm_patch_size=4, sm_enc_depth=1,
            sm_enc_heads=2, sm_enc_dim_head=8, sm_enc_mlp_dim=32, lg_patch_size=8, lg_enc_depth=1, lg_enc_heads=2,
            lg_enc_dim_head=16, lg_enc_mlp_dim=64, cross_attn_depth=1, cross_attn_heads=2, dropout=0.0, emb_dropout=0.0,
        ),
    ),
    _entry(
        "levit",
        lambda: LeViT(image_size=64, num_classes=10, stages=2, dim=(32, 48), depth=1, heads=(2, 4), mlp_mult=2),
        "img",
        (3, 64, 64),
    ),
    _entry(
        "cvt",
        lambda: CvT(num_classes=10, s1_emb_dim=16, s1_heads=1, s1_depth=1, s2_emb_dim=32, s2_heads=2, s2_depth=1,
                    s3_emb_dim=48, s3_heads=2, s3_depth=1),
        "x",
    ),
    _entry(
        "twins_svt",
        lambda: TwinsSVT(num_classes=10, s1_emb_dim=16, s1_local_patch_size=4, s1_global_k=4, s1_depth=1,
                         s2_emb_dim=24, s2_local_patch_size=4, s2_global_k=2, s2_depth=1, s3_emb_dim=32,
                         s3_local_patch_size=2, s3_global_k=2, s3_depth=1, s4_emb_dim=48, s4_local_patch_size=1,
                         s4_global_k=1, s4_depth=1),
        "x",
        (3, 64, 64),
    ),
    _entry(
        "regionvit",
        lambda: RegionViT(dim=(16, 24, 32, 48), depth=(1, 1, 1, 1), window_size=2, num_classes=10),
        "x",
        (3, 64, 64),
    ),
    _entry(
        "max_vit",
        lambda: MaxViT(num_classes=10, dim_conv_stem=16, dim=32, dim_head=16, depth=(1, 1), window_size=4,
                       mbconv_expansion_rate=2, mbconv_shrinkage_rate=0.25, dropout=0.0),
        "x",
    ),
    _entry(
        "mobile_vit",
        lambda: MobileViT(image_size=(64, 64), dims=[24, 32, 40], num_classes=10,
                          channels=[8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 32]),
        "x",
        (3, 64, 64),
    ),
    _entry(
        "vit_3d",
        lambda: VideoViT(image_size=32, image_patch_size=8, frames=4, frame_patch_size=2, num_classes=10, dim=32,
                         depth=2, heads=2, mlp_dim=64),
        "video",
        (3, 4, 32, 32),
    ),
)  # fmt: skip
