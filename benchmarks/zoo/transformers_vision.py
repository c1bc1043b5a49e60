"""Vision models of transformers: plain, windowed and pyramid transformers, and convolutional networks."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.zoo.registry import Inputs
from benchmarks.zoo.transformers_tiny import CLASSES, IMAGE, images, row

_vision = partial(row, family="vision", inputs=images)


def _segmentation(batch: int) -> Inputs:
    labels = torch.randint(0, CLASSES, (batch, IMAGE, IMAGE))
    return {"pixel_values": torch.randn(batch, 3, IMAGE, IMAGE), "labels": labels}


def _noise(batch: int) -> Inputs:
    """Images and the noise that orders their patches, so that nothing is drawn inside the model."""
    return {"pixel_values": torch.randn(batch, 3, IMAGE, IMAGE), "noise": torch.rand(batch, (IMAGE // 8) ** 2)}


ENTRIES = (
    _vision("deit", model="DeiTForImageClassification"),
    _vision("beit", model="BeitForImageClassification", use_relative_position_bias=True),
    _vision("data2vec_vision", model="Data2VecVisionForImageClassification", use_relative_position_bias=True),
    _vision(
        "swin",
        model="SwinForImageClassification",
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _vision(
        "swinv2",
        model="Swinv2ForImageClassification",
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        pretrained_window_sizes=[0, 0],
    ),
    _vision(
        "convnext_hf",
        model="ConvNextForImageClassification",
        patch_size=4,
        num_stages=2,
        hidden_sizes=[16, 32],
        depths=[1, 1],
    ),
    _vision(
        "convnextv2",
        model="ConvNextV2ForImageClassification",
        patch_size=4,
        num_stages=2,
        hidden_sizes=[16, 32],
        depths=[1, 1],
    ),
    _vision("dinov2", model="Dinov2ForImageClassification"),
    _vision("resnet_hf", model="ResNetForImageClassification", embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1]),
    _vision(
        "regnet",
        model="RegNetForImageClassification",
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        groups_width=8,
    ),
    _vision(
        "poolformer",
        model="PoolFormerForImageClassification",
        depths=[1, 1],
        hidden_sizes=[16, 32],
        num_encoder_blocks=2,
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
    ),
    _vision(
        "segformer",
        model="SegformerForImageClassification",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    ),
    _vision(
        "segformer_segmentation",
        model="SegformerForSemanticSegmentation",
        inputs=_segmentation,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    ),
    _vision(
        "mobilevit",
        model="MobileViTForImageClassification",
        patch_size=2,
        hidden_sizes=[16, 32, 32],
        neck_hidden_sizes=[8, 16, 16, 16, 16, 32, 32],
    ),
    _vision("mobilenet_v2", model="MobileNetV2ForImageClassification", depth_multiplier=0.25),
    _vision(
        "levit",
        model="LevitForImageClassification",
        patch_size=16,
        hidden_sizes=[16, 32, 32],
        num_attention_heads=[2, 4, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    _vision(
        "cvt",
        model="CvtForImageClassification",
        patch_sizes=[7, 3],
        patch_stride=[4, 2],
        patch_padding=[2, 1],
        embed_dim=[16, 32],
        num_heads=[2, 4],
        depth=[1, 2],
        mlp_ratio=[2.0, 2.0],
        attention_drop_rate=[0.0, 0.0],
        drop_rate=[0.0, 0.0],
        drop_path_rate=[0.0, 0.0],
        qkv_bias=[True, True],
        cls_token=[False, True],
        qkv_projection_method=["dw_bn", "dw_bn"],
        kernel_qkv=[3, 3],
        padding_kv=[1, 1],
        stride_kv=[2, 2],
        padding_q=[1, 1],
        stride_q=[1, 1],
    ),
    _vision(
        "pvt",
        model="PvtForImageClassification",
        num_encoder_blocks=2,
        depths=[1, 1],
        sequence_reduction_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[4, 2],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    ),
    _vision("vit_mae", model="ViTMAEForPreTraining", inputs=_noise),
    _vision("dinov2_with_registers", model="Dinov2WithRegistersForImageClassification"),
)
