"""x-transformers: one transformer with the variations of many papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from x_transformers import (
    AutoregressiveWrapper,
    ContinuousTransformerWrapper,
    Decoder,
    Encoder,
    TransformerWrapper,
    ViTransformerWrapper,
    XTransformer,
)

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("x_transformers",)
TOKENS, LENGTH, WIDTH = 32, 12, 32
SIZES = {"dim": WIDTH, "depth": 2, "heads": 4, "attn_dim_head": 8, "verbose": False}


def _ids(batch: int) -> Inputs:
    return {"x": torch.randint(1, TOKENS, (batch, LENGTH))}


def _next_token(output: Tensor, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())


def _same_token(output: Tensor, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch["x"].flatten())


def _classes(output: Tensor, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output, batch["labels"])


def _mean_square(output: Tensor, batch: Inputs) -> Tensor:
    return output.square().mean()


def _decoder(name: str, wrapper: dict[str, Any] | None = None, **layers: Any) -> ZooEntry:
    def build() -> nn.Module:
        model: nn.Module = TransformerWrapper(
            num_tokens=TOKENS, max_seq_len=LENGTH, attn_layers=Decoder(**SIZES, **layers), **(wrapper or {})
        )
        return model

    return ZooEntry(name=f"x_transformers/{name}", family="causal", build=build, inputs=_ids, loss_fn=_next_token)


def _encoder(name: str, wrapper: dict[str, Any] | None = None, **layers: Any) -> ZooEntry:
    def build() -> nn.Module:
        model: nn.Module = TransformerWrapper(
            num_tokens=TOKENS, max_seq_len=LENGTH, attn_layers=Encoder(**SIZES, **layers), **(wrapper or {})
        )
        return model

    return ZooEntry(name=f"x_transformers/{name}", family="masked", build=build, inputs=_ids, loss_fn=_same_token)


class _EncoderDecoder(nn.Module):
    """XTransformer with its inputs named `x` and `target`."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_tokens": TOKENS, "max_seq_len": LENGTH, "depth": 2, "heads": 4, "attn_dim_head": 8}
        sides = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in sizes.items()}
        self.model = XTransformer(dim=WIDTH, tie_token_emb=True, **sides)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.model(x, target)
        return loss


def _plain(name: str, build: Callable[[], nn.Module], inputs: Callable[[int], Inputs], **others: Any) -> ZooEntry:
    return ZooEntry(name=f"x_transformers/{name}", build=build, inputs=inputs, **others)


ENTRIES = (
    _decoder("rotary_rms", rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, ff_swish=True, ff_no_bias=True),
    _decoder("alibi_flash", alibi_pos_bias=True, alibi_num_heads=2, attn_flash=True),
    _decoder("grouped_queries_flash", attn_kv_heads=2, attn_flash=True, rotary_xpos=True),
    _decoder("one_kv_head_qk_norm", attn_one_kv_head=True, attn_qk_norm=True, attn_qk_norm_dim_scale=True),
    _decoder("rel_pos_memory_kv", rel_pos_bias=True, attn_num_mem_kv=2, attn_gate_values=True),
    _decoder("dynamic_pos_talking_heads", dynamic_pos_bias=True, attn_pre_talking_heads=True),
    _decoder("memory_tokens_macaron", {"num_memory_tokens": 4}, macaron=True, sandwich_norm=True),
    _decoder("sandwich_shift_tokens", sandwich_coef=1, shift_tokens=1, ff_relu_squared=True),
    _decoder("hyper_connections", num_residual_streams=2, add_value_residual=True),
    _decoder("residual_attention_gates", residual_attn=True, gate_residual=True),
    _decoder("attention_sinks", attn_head_learned_sink=True, attn_softclamp_logits=True),
    _decoder("tied_layers_cope", weight_tie_layers=True, attn_use_cope=True, attn_cope_max_pos=8),
    _decoder("mixture_of_softmax", {"mixture_of_softmax": True, "tie_embedding": False}, use_dynamic_tanh=True),
    _encoder("post_norm", pre_norm=False, scale_residual=True),
    _encoder("scalenorm_sinusoidal", {"scaled_sinu_pos_emb": True}, use_scalenorm=True),
    _encoder("sparse_topk_layerscale", attn_sparse_topk=4, use_layerscale=True, layerscale_init_value=0.1),
    _encoder("unet_skips_latent_kv", unet_skips=True, attn_use_latent_kv=True, attn_dim_latent_kv=8, attn_laser=True),
    _plain(
        "autoregressive_wrapper",
        lambda: AutoregressiveWrapper(
            TransformerWrapper(num_tokens=TOKENS, max_seq_len=LENGTH, attn_layers=Decoder(**SIZES))
        ),
        _ids,
        family="causal",
    ),
    _plain(
        "encoder_decoder",
        _EncoderDecoder,
        lambda batch: {**_ids(batch), "target": torch.randint(1, TOKENS, (batch, LENGTH))},
        family="encoder-decoder",
    ),
    _plain(
        "vit",
        lambda: ViTransformerWrapper(
            image_size=16, patch_size=4, num_classes=10, num_register_tokens=2, attn_layers=Encoder(**SIZES)
        ),
        lambda batch: {"img": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 10, (batch,))},
        family="vision",
        loss_fn=_classes,
    ),
    _plain(
        "continuous",
        lambda: ContinuousTransformerWrapper(dim_in=6, dim_out=6, max_seq_len=LENGTH, attn_layers=Encoder(**SIZES)),
        lambda batch: {"x": torch.randn(batch, LENGTH, 6)},
        family="series",
        loss_fn=_mean_square,
    ),
)
