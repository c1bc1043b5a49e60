"""Models of transformers that join images and text: contrastive pairs, captions, image tokens in a language model."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.zoo.registry import Inputs
from benchmarks.zoo.transformers_tiny import CLASSES, IMAGE, SEQUENCE, VOCABULARY, row, tokens

_IMAGE_TOKEN = VOCABULARY - 1
_PATCHES = (IMAGE // 8) ** 2


def _pictures(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, IMAGE, IMAGE)


def _pairs(batch: int) -> Inputs:
    """Images with their texts; the models compute the contrastive loss themselves (`return_loss`)."""
    return {"input_ids": _text(batch), "pixel_values": _pictures(batch)}


def _text(batch: int) -> torch.Tensor:
    """Tokens (batch, SEQUENCE) that end with the token 2, where the pooled feature stands."""
    text = torch.randint(3, VOCABULARY - 1, (batch, SEQUENCE))
    text[:, -1] = 2
    return text


def _captions(batch: int) -> Inputs:
    return {**tokens(batch), "pixel_values": _pictures(batch)}


def _image_tokens(batch: int) -> Inputs:
    """Text after one image, whose patches stand in the sequence as `_IMAGE_TOKEN`."""
    text = torch.randint(3, VOCABULARY - 1, (batch, SEQUENCE))
    ids = torch.cat([torch.full((batch, _PATCHES), _IMAGE_TOKEN), text], dim=1)
    labels = torch.cat([torch.full((batch, _PATCHES), -100), text], dim=1)
    return {"input_ids": ids, "labels": labels, "pixel_values": _pictures(batch)}


def _questions(batch: int) -> Inputs:
    return {
        "input_ids": _text(batch),
        "pixel_values": _pictures(batch),
        "labels": torch.rand(batch, CLASSES),
    }


def _clip_loss(output: object, batch: Inputs) -> torch.Tensor:
    """Symmetric cross entropy of the similarities of all pairs (CLIP, Radford et al. 2021)."""
    logits: torch.Tensor = output.logits_per_text  # type: ignore[attr-defined]
    target = torch.arange(logits.shape[0])
    entropy = torch.nn.functional.cross_entropy
    return (entropy(logits, target) + entropy(logits.t(), target)) / 2


def _flava_loss(output: object, batch: Inputs) -> torch.Tensor:
    """Mean square of the joint embedding."""
    joint: torch.Tensor = output.multimodal_embeddings  # type: ignore[attr-defined]
    return joint.square().mean()


_multimodal = partial(row, family="multimodal")

ENTRIES = (
    _multimodal("clip", model="CLIPModel", inputs=_pairs, loss_fn=_clip_loss, text_config={"eos_token_id": 2}),
    _multimodal("siglip", model="SiglipModel", inputs=_pairs, loss_fn=_clip_loss),
    _multimodal("altclip", model="AltCLIPModel", inputs=_pairs, loss_fn=_clip_loss),
    _multimodal("chinese_clip", model="ChineseCLIPModel", inputs=_pairs, loss_fn=_clip_loss),
    _multimodal(
        "align",
        model="AlignModel",
        inputs=_pairs,
        loss_fn=_clip_loss,
        vision_config={
            "kernel_sizes": [3, 3],
            "in_channels": [32, 16],
            "out_channels": [16, 32],
            "strides": [1, 2],
            "num_block_repeats": [1, 1],
            "expand_ratios": [1, 2],
            "width_coefficient": 1.0,
            "depth_coefficient": 1.0,
            "hidden_dim": 8,
        },
    ),
    _multimodal("blip", model="BlipForConditionalGeneration", inputs=_captions),
    _multimodal("git", model="GitForCausalLM", inputs=_captions),
    _multimodal(
        "llava",
        model="LlavaForConditionalGeneration",
        inputs=_image_tokens,
        image_token_index=_IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_config={"config_class": "CLIPVisionConfig"},
        text_config={"config_class": "LlamaConfig"},
    ),
    _multimodal(
        "paligemma",
        model="PaliGemmaForConditionalGeneration",
        inputs=_image_tokens,
        image_token_index=_IMAGE_TOKEN,
        vision_config={"config_class": "SiglipVisionConfig"},
        text_config={"config_class": "GemmaConfig"},
    ),
    _multimodal("flava", model="FlavaModel", inputs=_pairs, loss_fn=_flava_loss),
    _multimodal("vilt", model="ViltForQuestionAnswering", inputs=_questions),
)
