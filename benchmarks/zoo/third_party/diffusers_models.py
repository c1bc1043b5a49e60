"""diffusers: denoisers and autoencoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry
from benchmarks.zoo.third_party.without_dropout import without_dropout

PACKAGES = ("diffusers",)


def _sample(output: Any, batch: Inputs) -> Tensor:
    """Against the noise of the batch, as a denoiser is trained."""
    found = output[0] if isinstance(output, tuple) else next(iter(output.values()))
    return functional.mse_loss(found, batch["noise"])


def _control(output: Any, batch: Inputs) -> Tensor:
    """Of what ControlNet adds to the skips of a U-Net."""
    loss: Tensor = sum(added.square().mean() for added in (*output.down_block_res_samples, output.mid_block_res_sample))
    return loss


def _controlled() -> nn.Module:
    """Its last convolutions are zeros at first, behind which nothing else has a gradient: here they are not."""
    model = diffusers.ControlNetModel(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=24, attention_head_dim=8,
        conditioning_embedding_out_channels=(8, 16), **_BLOCKS,
    )  # fmt: skip
    last = (model.controlnet_cond_embedding.conv_out, model.controlnet_mid_block, *model.controlnet_down_blocks)
    for layer in last:
        layer.reset_parameters()
    return without_dropout(model)


def _entry(
    name: str, inputs: Callable[[int], Inputs], *, loss: Callable[[Any, Any], Tensor] = _sample, **arguments: Any
) -> ZooEntry:
    def build() -> nn.Module:
        return without_dropout(getattr(diffusers, name)(**arguments))

    return ZooEntry(name=f"diffusers/{name}", family="diffusion", build=build, inputs=inputs, loss_fn=loss)


def _steps(batch: int) -> Tensor:
    return torch.randint(0, 1000, (batch,))


def _image(channels: int, side: int, out: int | None = None) -> Callable[[int], Inputs]:
    return lambda batch: {
        "sample": torch.randn(batch, channels, side, side),
        "timestep": _steps(batch),
        "noise": torch.randn(batch, out or channels, side, side),
    }


def _text_image(
    channels: int, side: int, width: int, *, out: int | None = None, name: str = "hidden_states", **more: Any
) -> Callable[[int], Inputs]:
    """A denoiser of images under a text of 6 tokens. more: name -> shape of a further input beyond the batch."""
    return lambda batch: {
        name: torch.randn(batch, channels, side, side),
        "timestep": _steps(batch),
        "encoder_hidden_states": torch.randn(batch, 6, width),
        "noise": torch.randn(batch, out or channels, side, side),
        **{key: torch.randn(batch, *shape) for key, shape in more.items()},
    }


def _autoencoder(side: int = 32) -> Callable[[int], Inputs]:
    def inputs(batch: int) -> Inputs:
        image = torch.randn(batch, 3, side, side)
        return {"sample": image, "noise": image}

    return inputs


_BLOCKS: dict[str, Any] = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
_CODER: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, **_BLOCKS,
}  # fmt: skip

ENTRIES = (
    _entry("UNet2DModel", _image(3, 16), sample_size=16, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
           up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8, **_BLOCKS),
    _entry("UNet2DConditionModel", _text_image(4, 16, 24, name="sample"), sample_size=16, cross_attention_dim=24,
           down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
           attention_head_dim=8, **_BLOCKS),
    _entry("UNet3DConditionModel", lambda batch: {
               "sample": torch.randn(batch, 4, 3, 16, 16), "timestep": _steps(batch),
               "encoder_hidden_states": torch.randn(batch, 6, 24), "noise": torch.randn(batch, 4, 3, 16, 16)},
           sample_size=16, cross_attention_dim=24, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
           up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), attention_head_dim=8, **_BLOCKS),
    _entry("UNet1DModel", lambda batch: {
               "sample": torch.randn(batch, 14, 16), "timestep": _steps(batch), "noise": torch.randn(batch, 14, 16)},
           block_out_channels=(8, 8, 16, 16), in_channels=14, out_channels=14, time_embedding_type="positional",
           use_timestep_embedding=True, out_block_type="OutConv1DBlock", flip_sin_to_cos=False, freq_shift=1.0,
           mid_block_type="MidResTemporalBlock1D", act_fn="swish",
           down_block_types=("DownResnetBlock1D",) * 4, up_block_types=("UpResnetBlock1D",) * 3),
    _entry("AutoencoderKL", _autoencoder(), latent_channels=4, **_CODER),
    _entry("AutoencoderTiny", _autoencoder(), encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
           num_encoder_blocks=(1, 2), num_decoder_blocks=(2, 1)),
    _entry("VQModel", _autoencoder(), latent_channels=3, num_vq_embeddings=16, vq_embed_dim=4, **_CODER),
    _entry("PriorTransformer", lambda batch: {
               "hidden_states": torch.randn(batch, 16), "timestep": _steps(batch),
               "proj_embedding": torch.randn(batch, 16), "encoder_hidden_states": torch.randn(batch, 7, 16),
               "noise": torch.randn(batch, 16)},
           num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=16, num_embeddings=7,
           additional_embeddings=4),
    _entry("DiTTransformer2DModel", lambda batch: {
               "hidden_states": torch.randn(batch, 4, 8, 8), "timestep": _steps(batch),
               "class_labels": torch.randint(0, 10, (batch,)), "noise": torch.randn(batch, 8, 8, 8)},
           num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
           patch_size=2, num_embeds_ada_norm=1000, norm_type="ada_norm_zero"),
    _entry("PixArtTransformer2DModel", lambda batch: {
               **_text_image(4, 8, 16, out=8)(batch)},
           num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
           patch_size=2, cross_attention_dim=16, caption_channels=16, use_additional_conditions=False),
    _entry("SD3Transformer2DModel", _text_image(4, 16, 32, pooled_projections=(64,)), sample_size=16, patch_size=2,
           in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=32,
           caption_projection_dim=32, pooled_projection_dim=64, out_channels=4),
    _entry("AuraFlowTransformer2DModel", _text_image(4, 16, 32), sample_size=16, patch_size=2, in_channels=4,
           num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=4,
           joint_attention_dim=32, caption_projection_dim=32, out_channels=4, pos_embed_max_size=64),
    _entry("SanaTransformer2DModel", _text_image(4, 8, 24), patch_size=1, in_channels=4, out_channels=4, num_layers=1,
           attention_head_dim=8, num_attention_heads=2, num_cross_attention_heads=2, cross_attention_head_dim=8,
           cross_attention_dim=16, caption_channels=24, sample_size=8),
    _entry("FluxTransformer2DModel", lambda batch: {
               "hidden_states": torch.randn(batch, 16, 4), "encoder_hidden_states": torch.randn(batch, 6, 32),
               "pooled_projections": torch.randn(batch, 32), "timestep": torch.rand(batch),
               "img_ids": torch.randn(16, 3), "txt_ids": torch.randn(6, 3), "noise": torch.randn(batch, 16, 4)},
           patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
           num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8)),
    _entry("CogVideoXTransformer3DModel", lambda batch: {
               "hidden_states": torch.randn(batch, 1, 4, 8, 8), "timestep": _steps(batch),
               "encoder_hidden_states": torch.randn(batch, 8, 8), "noise": torch.randn(batch, 1, 4, 8, 8)},
           num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2,
           text_embed_dim=8, num_layers=2, sample_width=8, sample_height=8, sample_frames=8, patch_size=2,
           max_text_seq_length=8),
    _entry("LatteTransformer3DModel", lambda batch: {
               "hidden_states": torch.randn(batch, 4, 2, 8, 8), "timestep": _steps(batch),
               "encoder_hidden_states": torch.randn(batch, 5, 8), "noise": torch.randn(batch, 8, 2, 8, 8)},
           sample_size=8, num_layers=1, patch_size=2, attention_head_dim=4, num_attention_heads=2, caption_channels=8,
           in_channels=4, cross_attention_dim=8, out_channels=8, attention_bias=True, activation_fn="gelu-approximate",
           num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False, video_length=2),
    _entry("WanTransformer3DModel", lambda batch: {
               "hidden_states": torch.randn(batch, 4, 2, 8, 8), "timestep": _steps(batch),
               "encoder_hidden_states": torch.randn(batch, 5, 16), "noise": torch.randn(batch, 4, 2, 8, 8)},
           patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
           text_dim=16, freq_dim=64, ffn_dim=32, num_layers=2, rope_max_seq_len=32),
    _entry("StableCascadeUNet", lambda batch: {
               "sample": torch.randn(batch, 4, 8, 8), "timestep_ratio": torch.rand(batch),
               "clip_text_pooled": torch.randn(batch, 1, 16), "noise": torch.randn(batch, 4, 8, 8)},
           in_channels=4, out_channels=4, patch_size=1, conditioning_dim=16, block_out_channels=(16, 16),
           num_attention_heads=(2, 2), down_num_layers_per_block=(1, 1), up_num_layers_per_block=(1, 1),
           down_blocks_repeat_mappers=(1, 1), up_blocks_repeat_mappers=(1, 1), dropout=(0.0, 0.0),
           block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 2,
           clip_text_pooled_in_channels=16, switch_level=(False,), timestep_conditioning_type=("sca",)),
    ZooEntry(
        name="diffusers/ControlNetModel", family="diffusion", build=_controlled,
        inputs=lambda batch: {
            "sample": torch.randn(batch, 4, 16, 16), "timestep": _steps(batch),
            "encoder_hidden_states": torch.randn(batch, 6, 24), "controlnet_cond": torch.randn(batch, 3, 32, 32)},
        loss_fn=_control),
    _entry("UVit2DModel", lambda batch: {
               "input_ids": torch.randint(0, 40, (batch, 8, 8)), "encoder_hidden_states": torch.randn(batch, 6, 16),
               "pooled_text_emb": torch.randn(batch, 16), "micro_conds": torch.rand(batch, 5),
               "labels": torch.randint(0, 32, (batch, 8, 8))},
           loss=lambda output, batch: functional.cross_entropy(output, batch["labels"]), hidden_size=32,
           cond_embed_dim=16, micro_cond_encode_dim=8, micro_cond_embed_dim=40, encoder_hidden_size=16, vocab_size=40,
           codebook_size=32, in_channels=16, block_out_channels=16, num_res_blocks=1, block_num_heads=2,
           num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, sample_size=8),
)  # fmt: skip
