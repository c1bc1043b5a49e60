"""Audio models of transformers: encoders of raw waves and of spectrograms, and speech to text."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.zoo.registry import Inputs
from benchmarks.zoo.transformers_tiny import CLASSES, SEQUENCE, VOCABULARY, row

_SAMPLES, _FRAMES, _MELS = 400, 32, 16


def _waves(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, _SAMPLES), "labels": torch.randint(0, CLASSES, (batch,))}


def _features_to_text(batch: int) -> Inputs:
    return {
        "input_features": torch.randn(batch, _MELS, _FRAMES),
        "labels": torch.randint(3, VOCABULARY, (batch, SEQUENCE)),
    }


def _frames_to_text(batch: int) -> Inputs:
    inputs = _features_to_text(batch)
    return {**inputs, "input_features": inputs["input_features"].transpose(1, 2).contiguous()}


def _spectrograms(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, _FRAMES, _MELS), "labels": torch.randint(0, CLASSES, (batch,))}


_WAVES: dict[str, Any] = {
    "inputs": _waves,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
    "mask_time_prob": 0.0,
}
_audio = partial(row, family="audio")

ENTRIES = (
    _audio("whisper", model="WhisperForConditionalGeneration", inputs=_features_to_text, max_source_positions=16),
    _audio("speech_to_text", model="Speech2TextForConditionalGeneration", inputs=_frames_to_text),
    _audio("wav2vec2", model="Wav2Vec2ForSequenceClassification", **_WAVES),
    _audio("hubert", model="HubertForSequenceClassification", **_WAVES),
    _audio("wavlm", model="WavLMForSequenceClassification", **_WAVES),
    _audio("sew", model="SEWForSequenceClassification", **_WAVES),
    _audio("unispeech", model="UniSpeechForSequenceClassification", **_WAVES),
    _audio(
        "data2vec_audio", model="Data2VecAudioForSequenceClassification", **{**_WAVES, "num_conv_pos_embeddings": 2}
    ),
    _audio(
        "wav2vec2_ctc",
        model="Wav2Vec2ForCTC",
        **{**_WAVES, "inputs": lambda batch: {**_waves(batch), "labels": torch.randint(1, 96, (batch, 5))}},
    ),
    _audio(
        "audio_spectrogram_transformer",
        model="ASTForAudioClassification",
        inputs=_spectrograms,
        max_length=_FRAMES,
        frequency_stride=4,
        time_stride=4,
    ),
    _audio(
        "moonshine",
        model="MoonshineForConditionalGeneration",
        inputs=lambda batch: {
            "input_values": torch.randn(batch, 2000),
            "labels": torch.randint(3, VOCABULARY, (batch, SEQUENCE)),
        },
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
    ),
)
