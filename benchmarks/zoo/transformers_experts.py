"""Mixtures of experts of transformers, in float64: see `ZooEntry.dtype`."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.zoo.transformers_tiny import row

_experts = partial(row, family="mixture-of-experts", dtype=torch.float64)

ENTRIES = (
    _experts("mixtral", model="MixtralForCausalLM"),
    _experts("qwen2_moe", model="Qwen2MoeForCausalLM"),
    _experts("qwen3_moe", model="Qwen3MoeForCausalLM", norm_topk_prob=True),
    _experts("olmoe", model="OlmoeForCausalLM"),
    _experts(
        "deepseek_v3",
        model="DeepseekV3ForCausalLM",
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    _experts("phimoe", model="PhimoeForCausalLM", router_jitter_noise=0.0),
    _experts("granitemoe", model="GraniteMoeForCausalLM"),
    _experts(
        "switch_transformers",
        model="SwitchTransformersForConditionalGeneration",
        dtype=torch.float32,  # its routers cast themselves to float32
        router_jitter_noise=0.0,
        expert_capacity=64,
        decoder_start_token_id=0,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    _experts(
        "nllb_moe",
        model="NllbMoeForConditionalGeneration",
        dtype=torch.float32,  # its routers cast themselves to float32
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        expert_capacity=64,
        moe_token_dropout=0.0,
        router_jitter_noise=0.0,
    ),
    _experts("jetmoe", model="JetMoeForCausalLM", kv_channels=8),
    _experts(
        "gpt_oss", model="GptOssForCausalLM", sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    _experts("llama4_text", model="Llama4ForCausalLM", intermediate_size_mlp=64, num_experts_per_tok=1),
    _experts(
        "dbrx",
        model="DbrxForCausalLM",
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.0},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    ),
    _experts("minimax", model="MiniMaxForCausalLM", block_size=8),
    _experts(
        "qwen3_next",
        model="Qwen3NextForCausalLM",
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    _experts(
        "jamba",
        model="JambaForCausalLM",
        use_mamba_kernels=False,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_dt_rank=4,
    ),
    _experts("ernie4_5_moe", model="Ernie4_5_MoeForCausalLM", moe_num_experts=4, moe_k=2, moe_layer_start_index=1),
    _experts("glm4_moe", model="Glm4MoeForCausalLM", first_k_dense_replace=1),
)
