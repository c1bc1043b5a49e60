"""peft: adapters on a tiny model of transformers, one entry a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import peft
import torch
from peft import PeftConfig, TaskType
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("peft",)
TOKENS, LENGTH = 64, 12
TARGETS = ["q_proj", "v_proj"]


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def _t5() -> nn.Module:
    config = T5Config(
        vocab_size=TOKENS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def _tokens(batch: int) -> Inputs:
    ids = torch.randint(0, TOKENS, (batch, LENGTH))
    return {"input_ids": ids, "labels": ids}


def _entry(name: str, config: Callable[..., PeftConfig], base: Callable[[], nn.Module] = _llama, **options: Any) -> Any:
    others = {key: options.pop(key) for key in ("branches", "dtype", "notes") if key in options}

    def build() -> nn.Module:
        task = TaskType.CAUSAL_LM if base is _llama else TaskType.SEQ_2_SEQ_LM
        model = peft.get_peft_model(cast(Any, base()), config(task_type=task, **options))
        _give_values(model)
        return cast(nn.Module, model)

    return ZooEntry(name=f"peft/{name}", family="adapter", build=build, inputs=_tokens, **others)


def _give_values(model: nn.Module) -> None:
    """Adapters begin as nothing, where half of their gradients are zero: values as in the middle of a training."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "prompt_encoder" not in name:
            nn.init.normal_(parameter, 1.0 if "ia3" in name else 0.0, 0.1)


ENTRIES: tuple[ZooEntry, ...] = (
    _entry("lora", peft.LoraConfig, r=4, target_modules=TARGETS),
    _entry("lora_all_linear_rslora", peft.LoraConfig, r=4, target_modules="all-linear", use_rslora=True),
    _entry("dora", peft.LoraConfig, r=4, target_modules=TARGETS, use_dora=True),
    _entry("lora_embedding", peft.LoraConfig, r=4, target_modules=["embed_tokens"], modules_to_save=["lm_head"]),
    _entry("loha", peft.LoHaConfig, r=4, target_modules=TARGETS, branches="example"),
    _entry("lokr", peft.LoKrConfig, r=4, target_modules=TARGETS, branches="example"),
    _entry("adalora", peft.AdaLoraConfig, init_r=4, target_r=2, total_step=10, target_modules=TARGETS),
    _entry("ia3", peft.IA3Config, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    _entry("oft", peft.OFTConfig, oft_block_size=8, r=0, target_modules=TARGETS),
    _entry("boft", peft.BOFTConfig, boft_block_size=4, boft_n_butterfly_factor=2, target_modules=TARGETS),
    _entry("hra", peft.HRAConfig, r=4, target_modules=TARGETS),
    _entry("vera", peft.VeraConfig, r=4, target_modules=TARGETS),
    _entry("fourierft", peft.FourierFTConfig, n_frequency=16, target_modules=TARGETS),
    _entry("ln_tuning", peft.LNTuningConfig),
    _entry("prompt_tuning", peft.PromptTuningConfig, num_virtual_tokens=4),
    _entry("p_tuning", peft.PromptEncoderConfig, num_virtual_tokens=4, encoder_hidden_size=16),
    _entry("prefix_tuning", peft.PrefixTuningConfig, num_virtual_tokens=4),
    _entry("prefix_tuning_t5", peft.PrefixTuningConfig, base=_t5, num_virtual_tokens=4),
    _entry("lora_t5", peft.LoraConfig, base=_t5, r=4, target_modules=["q", "v"]),
)
