"""State-space and recurrent language models of transformers, and hybrids with attention; the pure-torch scans."""

from __future__ import annotations

from functools import partial

from benchmarks.zoo.transformers_tiny import row

_state_space = partial(row, family="state-space")

ENTRIES = (
    _state_space("mamba", model="MambaForCausalLM"),
    _state_space("mamba2", model="Mamba2ForCausalLM", num_heads=8, head_dim=8, n_groups=2),
    _state_space("falcon_mamba", model="FalconMambaForCausalLM"),
    _state_space("rwkv", model="RwkvForCausalLM", attention_hidden_size=32),
    _state_space(
        "recurrent_gemma",
        model="RecurrentGemmaForCausalLM",
        attention_window_size=16,
        block_types=["recurrent", "attention"],
    ),
    _state_space(
        "zamba",
        model="ZambaForCausalLM",
        use_mamba_kernels=False,
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        num_hidden_layers=3,
        num_key_value_heads=4,
        mamba_dt_rank=4,
        attention_head_dim=16,
    ),
    _state_space(
        "zamba2",
        model="Zamba2ForCausalLM",
        use_mamba_kernels=False,
        layers_block_type=["mamba", "hybrid"],
        n_mamba_heads=8,
        num_key_value_heads=4,
    ),
    _state_space("bamba", model="BambaForCausalLM", attn_layer_indices=[1], mamba_n_heads=8, mamba_n_groups=2),
    _state_space("falcon_h1", model="FalconH1ForCausalLM", mamba_d_ssm=64, mamba_n_heads=8),
    _state_space(
        "lfm2", model="Lfm2ForCausalLM", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
    ),
    _state_space("xlstm", model="xLSTMForCausalLM", mode="train", autocast_kernel_dtype="float32"),
)
