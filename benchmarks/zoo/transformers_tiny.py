"""Tiny models of transformers from one table of sizes: a row of the zoo is a class name and what is special about it.

    row("phi", "causal", "PhiForCausalLM")                       # every size from SIZES
    row("gemma", "causal", "GemmaForCausalLM", tokens, head_dim=16)
    row("clip", "multimodal", "CLIPModel", contrastive, text_config={"projection_dim": 32})

`tiny_config` sets those fields of a configuration class that SIZES names and whose default is a plain number, turns
every dropout off, does the same for the configurations inside it, and lets the row's own values win. Nothing is
downloaded, and the weights are random.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.zoo.registry import Family, Inputs, ZooEntry

VOCABULARY = 96
SEQUENCE = 16
CLASSES = 8
IMAGE = 32
IGNORED = -100

SIZES: Mapping[str, int | bool | None] = {
    **dict.fromkeys(("vocab_size",), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "decoder_hidden_size"), 32),
    **dict.fromkeys(("projection_dim", "project_dim", "lru_width", "image_text_hidden_size"), 32),
    **dict.fromkeys(("encoder_hidden_size", "decoder_input_dim", "conv_channels"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "decoder_num_hidden_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 64),
    **dict.fromkeys(("hidden_dim", "ffn_hidden_size", "decoder_intermediate_size", "d_inner"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "seq_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_size"), 32),
    **dict.fromkeys(("image_size",), IMAGE),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("num_mel_bins", "input_feat_per_channel"), 16),
    **dict.fromkeys(("state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("num_labels",), CLASSES),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    **dict.fromkeys(("use_cache", "apply_spec_augment"), False),
}
"""Size by field name, as the configurations of transformers spell it; a field that a class does not have is skipped."""


def tiny_config(config_class: Any, **changes: Any) -> Any:
    """A configuration at the sizes of SIZES without dropout. A dict in `changes` changes the configuration inside."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if _is_number(field.default) and field.name in SIZES:
            values[field.name] = SIZES[field.name]
        elif _is_dropout(field.name) and type(field.default) in (int, float):
            values[field.name] = type(field.default)(0)  # type: ignore[misc]
    for name, inner in config_class.sub_configs.items():
        change = changes.pop(name, {})
        if isinstance(change, dict):
            chosen = getattr(transformers, change.pop("config_class", ""), inner)
            values[name] = tiny_config(chosen, **change)
        else:
            values[name] = change
    return config_class(**{**values, "num_labels": CLASSES, **changes})


def _is_number(default: Any) -> bool:
    return default is None or isinstance(default, int)


def _is_dropout(name: str) -> bool:
    return "drop" in name and "dropping" not in name


def tokens(batch: int) -> Inputs:
    """Input ids and labels (batch, SEQUENCE) of a language model; every fifth label or so is ignored."""
    labels = torch.randint(3, VOCABULARY, (batch, SEQUENCE))
    labels[torch.rand(batch, SEQUENCE) < 0.2] = IGNORED
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, SEQUENCE)), "labels": labels}


def padded_tokens(batch: int) -> Inputs:
    """`tokens` whose rows end in padding of different lengths, with the attention mask that says so."""
    inputs = tokens(batch)
    padding = torch.arange(SEQUENCE) >= SEQUENCE - torch.arange(batch).unsqueeze(1) % 4
    inputs["input_ids"][padding] = 0
    inputs["labels"][padding] = IGNORED
    return {**inputs, "attention_mask": (~padding).long()}


def images(batch: int) -> Inputs:
    """Images (batch, 3, IMAGE, IMAGE) and one class per image."""
    return {"pixel_values": torch.randn(batch, 3, IMAGE, IMAGE), "labels": torch.randint(0, CLASSES, (batch,))}


def row(
    name: str,
    family: Family,
    model: str,
    inputs: Callable[[int], Inputs] = tokens,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    notes: str = "",
    **changes: Any,
) -> ZooEntry:
    """The entry of `transformers.<model>` at tiny sizes; `changes` are fields of its configuration."""

    def build() -> nn.Module:
        model_class = getattr(transformers, model)
        config = tiny_config(model_class.config_class, **_copied(changes))
        config._experts_implementation = "eager"  # the others want float32 or gather the weights of every token
        module: nn.Module = model_class(config)
        return module

    return ZooEntry(name=name, family=family, build=build, inputs=inputs, loss_fn=loss_fn, dtype=dtype, notes=notes)


def _copied(changes: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in changes.items()}
