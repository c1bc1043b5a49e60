"""Causal language models of transformers: decoders with every kind of position, norm, head grouping and block."""

from __future__ import annotations

from functools import partial

from benchmarks.zoo.transformers_tiny import padded_tokens, row

_causal = partial(row, family="causal")

ENTRIES = (
    _causal("gpt_neo", model="GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], window_size=8),
    _causal("gpt_neox", model="GPTNeoXForCausalLM"),
    _causal("gptj", model="GPTJForCausalLM", rotary_dim=4),
    _causal("gpt_bigcode", model="GPTBigCodeForCausalLM"),
    _causal("opt", model="OPTForCausalLM", word_embed_proj_dim=32),
    _causal("bloom", model="BloomForCausalLM"),
    _causal("falcon", model="FalconForCausalLM"),
    _causal("mpt", model="MptForCausalLM", attn_config={"attn_pdrop": 0}),
    _causal("codegen", model="CodeGenForCausalLM", rotary_dim=4),
    _causal("mistral", model="MistralForCausalLM", inputs=padded_tokens, sliding_window=8),
    _causal("qwen2", model="Qwen2ForCausalLM", inputs=padded_tokens),
    _causal("qwen3", model="Qwen3ForCausalLM"),
    _causal("gemma", model="GemmaForCausalLM"),
    _causal("gemma2", model="Gemma2ForCausalLM", sliding_window=8),
    _causal("gemma3", model="Gemma3ForCausalLM", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    _causal("phi", model="PhiForCausalLM"),
    _causal("phi3", model="Phi3ForCausalLM"),
    _causal("stablelm", model="StableLmForCausalLM"),
    _causal("starcoder2", model="Starcoder2ForCausalLM"),
    _causal("olmo", model="OlmoForCausalLM"),
    _causal("olmo2", model="Olmo2ForCausalLM"),
    _causal("cohere", model="CohereForCausalLM", use_qk_norm=True),
    _causal("granite", model="GraniteForCausalLM"),
    _causal("persimmon", model="PersimmonForCausalLM"),
    _causal("glm", model="GlmForCausalLM"),
    _causal("nemotron", model="NemotronForCausalLM"),
    _causal("smollm3", model="SmolLM3ForCausalLM"),
    _causal("biogpt", model="BioGptForCausalLM"),
    _causal("xglm", model="XGLMForCausalLM"),
    _causal("exaone4", model="Exaone4ForCausalLM", layer_types=["sliding_attention", "full_attention"]),
    _causal("helium", model="HeliumForCausalLM"),
    _causal("ctrl", model="CTRLLMHeadModel", dff=64),
)
