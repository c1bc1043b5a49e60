"""Encoder-decoder language models of transformers: cross attention, relative position bias, tied embeddings."""

from __future__ import annotations

from functools import partial

from benchmarks.zoo.transformers_tiny import padded_tokens, row, tokens

_seq2seq = partial(row, family="encoder-decoder", inputs=tokens)

ENTRIES = (
    _seq2seq("mt5", model="MT5ForConditionalGeneration", inputs=padded_tokens),
    _seq2seq("umt5", model="UMT5ForConditionalGeneration"),
    _seq2seq("bart", model="BartForConditionalGeneration"),
    _seq2seq("mbart", model="MBartForConditionalGeneration", inputs=padded_tokens),
    _seq2seq("pegasus", model="PegasusForConditionalGeneration"),
    _seq2seq("marian", model="MarianMTModel"),
    _seq2seq("m2m_100", model="M2M100ForConditionalGeneration"),
    _seq2seq(
        "led",
        model="LEDForConditionalGeneration",
        attention_window=8,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    _seq2seq("blenderbot", model="BlenderbotForConditionalGeneration"),
    _seq2seq("blenderbot_small", model="BlenderbotSmallForConditionalGeneration"),
    _seq2seq("plbart", model="PLBartForConditionalGeneration"),
    _seq2seq(
        "longt5", model="LongT5ForConditionalGeneration", inputs=padded_tokens, local_radius=4, decoder_start_token_id=0
    ),
    _seq2seq(
        "prophetnet",
        model="ProphetNetForConditionalGeneration",
        num_encoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        ngram=2,
        disable_ngram_loss=False,
    ),
)
