"""Masked language models of transformers: encoders with padding, and those that replace or restrict attention."""

from __future__ import annotations

from functools import partial

from benchmarks.zoo.transformers_tiny import padded_tokens, row, tokens

_masked = partial(row, family="masked", inputs=padded_tokens)

ENTRIES = (
    _masked("roberta", model="RobertaForMaskedLM"),
    _masked("distilbert", model="DistilBertForMaskedLM"),
    _masked("albert", model="AlbertForMaskedLM"),
    _masked("electra", model="ElectraForMaskedLM"),
    _masked("deberta", model="DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _masked(
        "deberta_v2",
        model="DebertaV2ForMaskedLM",
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["c2p", "p2c"],
        share_att_key=True,
    ),
    _masked("modernbert", model="ModernBertForMaskedLM", local_attention=8, global_attn_every_n_layers=2),
    _masked("mpnet", model="MPNetForMaskedLM"),
    _masked("xlm_roberta", model="XLMRobertaForMaskedLM"),
    _masked("camembert", model="CamembertForMaskedLM"),
    _masked("convbert", model="ConvBertForMaskedLM"),
    _masked("mobilebert", model="MobileBertForMaskedLM", intra_bottleneck_size=16),
    _masked("squeezebert", model="SqueezeBertForMaskedLM"),
    _masked("fnet", model="FNetForMaskedLM", inputs=tokens),
    _masked("funnel", model="FunnelForMaskedLM", block_sizes=[1, 1], num_decoder_layers=1),
    _masked(
        "nystromformer",
        model="NystromformerForMaskedLM",
        inputs=tokens,
        num_landmarks=16,
        segment_means_seq_len=16,
        conv_kernel_size=5,
    ),
    _masked("longformer", model="LongformerForMaskedLM", inputs=tokens, attention_window=8),
    _masked("big_bird", model="BigBirdForMaskedLM", attention_type="original_full"),
    _masked("roformer", model="RoFormerForMaskedLM"),
    _masked("megatron_bert", model="MegatronBertForMaskedLM"),
    _masked("rembert", model="RemBertForMaskedLM", input_embedding_size=16, output_embedding_size=16),
    _masked("esm", model="EsmForMaskedLM", position_embedding_type="rotary", token_dropout=False, mask_token_id=3),
    _masked("layoutlm", model="LayoutLMForMaskedLM"),
)
