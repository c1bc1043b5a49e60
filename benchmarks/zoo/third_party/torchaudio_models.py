"""torchaudio: encoders of speech, transducers, synthesis and separation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchaudio import models
from torchaudio.models import wav2vec2

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("torchaudio",)
FRAMES, MELS, SYMBOLS = 24, 16, 12
CONVOLUTIONS = [(16, 10, 5), (16, 3, 2), (16, 2, 2)]


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _mean_square(output: Any, batch: Inputs) -> Tensor:
    return _first(output).square().mean()


def _cross_entropy(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(_first(output).flatten(0, -2), batch["labels"].flatten())


def _waveforms(batch: int) -> Inputs:
    return {"waveforms": torch.randn(batch, 800)}


def _wav2vec2(extractor: str, norm_first: bool, **others: Any) -> nn.Module:
    make: Callable[..., nn.Module] = models.wavlm_model if others else models.wav2vec2_model
    return make(
        extractor_mode=extractor,
        extractor_conv_layer_config=CONVOLUTIONS,
        extractor_conv_bias=norm_first,
        encoder_embed_dim=32,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=8,
        encoder_pos_conv_groups=2,
        encoder_num_layers=2,
        encoder_num_heads=4,
        encoder_attention_dropout=0.0,
        encoder_ff_interm_features=64,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.0,
        encoder_layer_norm_first=norm_first,
        encoder_layer_drop=0.0,
        aux_num_out=SYMBOLS,
        **others,
    )


class _EveryThird(nn.Module):
    """Masks every third frame; the package's own generator draws spans on the CPU, frame by frame."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.rand(32))

    def forward(self, x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        mask = (torch.arange(x.shape[1], device=x.device) % 3 == 0).expand(x.shape[:2])
        return torch.where(mask[..., None], self.embedding, x), mask


def _hubert() -> nn.Module:
    logits = wav2vec2.components.LogitGenerator(32, SYMBOLS, final_dim=16, skip_masked=False, skip_nomask=False)
    model: nn.Module = models.HuBERTPretrainModel(
        _wav2vec2("group_norm", norm_first=False), _EveryThird(), logits, feature_grad_mult=None
    )
    return model


def _hubert_loss(output: Any, batch: Inputs) -> Tensor:
    masked, others, penalty = output
    first = partial(torch.zeros, dtype=torch.int64)
    losses = [functional.cross_entropy(logits, first(logits.shape[0])) for logits in (masked, others)]
    loss: Tensor = losses[0] + 0.5 * losses[1] + penalty
    return loss


def _tacotron2_loss(output: Any, batch: Inputs) -> Tensor:
    before, after, gate, _ = output
    target = batch["mel_specgram"]
    stop = functional.binary_cross_entropy_with_logits(gate, torch.zeros_like(gate))
    loss: Tensor = functional.mse_loss(before, target) + functional.mse_loss(after, target) + stop
    return loss


def _rnnt() -> nn.Module:
    model: nn.Module = models.emformer_rnnt_model(
        input_dim=MELS,
        encoding_dim=32,
        num_symbols=SYMBOLS,
        segment_length=8,
        right_context_length=2,
        time_reduction_input_dim=16,
        time_reduction_stride=2,
        transformer_num_heads=4,
        transformer_ffn_dim=64,
        transformer_num_layers=2,
        transformer_dropout=0.0,
        transformer_activation="gelu",
        transformer_left_context_length=4,
        transformer_max_memory_size=0,
        transformer_weight_init_scale_strategy="depthwise",
        transformer_tanh_on_mem=True,
        symbol_embedding_dim=16,
        num_lstm_layers=1,
        lstm_layer_norm=True,
        lstm_layer_norm_epsilon=1e-5,
        lstm_dropout=0.0,
    )
    return model


def _lengths(batch: int, longest: int, dtype: torch.dtype = torch.int64) -> Tensor:
    lengths = torch.randint(longest // 2, longest + 1, (batch,), dtype=dtype).sort(descending=True).values
    lengths[0] = longest
    return lengths


_audio = partial(ZooEntry, family="audio")

ENTRIES = (
    _audio(
        name="torchaudio/wav2vec2_base",
        build=lambda: _wav2vec2("group_norm", norm_first=False),
        inputs=_waveforms,
        loss_fn=_mean_square,
        branches="example",
    ),
    _audio(
        name="torchaudio/wav2vec2_layer_norm",
        build=lambda: _wav2vec2("layer_norm", norm_first=True),
        inputs=lambda batch: {**_waveforms(batch), "lengths": _lengths(batch, 800)},
        loss_fn=_mean_square,
        branches="example",
    ),
    _audio(
        name="torchaudio/wavlm",
        build=lambda: _wav2vec2("group_norm", norm_first=False, encoder_num_buckets=8, encoder_max_distance=16),
        inputs=_waveforms,
        loss_fn=_mean_square,
        branches="example",
    ),
    _audio(
        name="torchaudio/hubert_pretraining",
        build=_hubert,
        inputs=lambda batch: {**_waveforms(batch), "labels": torch.randint(0, SYMBOLS, (batch, 39))},
        loss_fn=_hubert_loss,
        branches="example",
    ),
    _audio(
        name="torchaudio/conformer",
        build=lambda: models.Conformer(MELS, num_heads=4, ffn_dim=32, num_layers=2, depthwise_conv_kernel_size=7),
        inputs=lambda batch: {"input": torch.randn(batch, FRAMES, MELS), "lengths": _lengths(batch, FRAMES)},
        loss_fn=_mean_square,
        branches="example",
    ),
    _audio(
        name="torchaudio/emformer",
        build=lambda: models.Emformer(
            MELS,
            num_heads=4,
            ffn_dim=32,
            num_layers=2,
            segment_length=8,
            left_context_length=4,
            right_context_length=2,
            max_memory_size=2,
        ),
        inputs=lambda batch: {"input": torch.randn(batch, FRAMES + 2, MELS), "lengths": _lengths(batch, FRAMES)},
        loss_fn=_mean_square,
        branches="example",
    ),
    _audio(
        name="torchaudio/emformer_rnnt",
        build=_rnnt,
        inputs=lambda batch: {
            "sources": torch.randn(batch, FRAMES + 2, MELS),
            "source_lengths": _lengths(batch, FRAMES, torch.int32),
            "targets": torch.randint(0, SYMBOLS, (batch, 6), dtype=torch.int32),
            "target_lengths": _lengths(batch, 6, torch.int32),
        },
        loss_fn=_mean_square,
        branches="example",
    ),
    _audio(
        name="torchaudio/tacotron2",
        build=lambda: models.Tacotron2(
            n_mels=MELS,
            n_symbol=SYMBOLS,
            symbol_embedding_dim=16,
            encoder_embedding_dim=16,
            decoder_rnn_dim=32,
            decoder_dropout=0.0,
            attention_rnn_dim=32,
            attention_hidden_dim=16,
            attention_location_n_filter=4,
            attention_location_kernel_size=5,
            attention_dropout=0.0,
            prenet_dim=16,
            postnet_n_convolution=3,
            postnet_embedding_dim=16,
        ),
        inputs=lambda batch: {
            "tokens": torch.randint(0, SYMBOLS, (batch, 10)),
            "token_lengths": _lengths(batch, 10),
            "mel_specgram": torch.randn(batch, MELS, 6),
            "mel_specgram_lengths": torch.full((batch,), 6),
        },
        loss_fn=_tacotron2_loss,
        branches="example",
        notes="its prenet and postnet drop values at rates that no argument sets",
    ),
    _audio(
        name="torchaudio/deepspeech",
        build=lambda: models.DeepSpeech(n_feature=MELS, n_hidden=32, n_class=SYMBOLS),
        inputs=lambda batch: {
            "x": torch.randn(batch, 1, FRAMES, MELS),
            "labels": torch.randint(0, SYMBOLS, (batch, FRAMES)),
        },
        loss_fn=_cross_entropy,
    ),
    _audio(
        name="torchaudio/wavernn",
        build=lambda: models.WaveRNN(
            upsample_scales=[2, 2],
            n_classes=16,
            hop_length=4,
            n_res_block=2,
            n_rnn=32,
            n_fc=32,
            kernel_size=3,
            n_freq=MELS,
            n_hidden=16,
            n_output=16,
        ),
        inputs=lambda batch: {
            "waveform": torch.randn(batch, 1, 40),
            "specgram": torch.randn(batch, 1, MELS, 12),
            "labels": torch.randint(0, 16, (batch, 40)),
        },
        loss_fn=_cross_entropy,
    ),
    _audio(
        name="torchaudio/conv_tasnet",
        build=lambda: models.ConvTasNet(
            num_sources=2,
            enc_num_feats=32,
            msk_num_feats=16,
            msk_num_hidden_feats=32,
            msk_num_layers=3,
            msk_num_stacks=2,
        ),
        inputs=lambda batch: {"input": torch.randn(batch, 1, 160)},
        loss_fn=_mean_square,
    ),
    _audio(
        name="torchaudio/hdemucs",
        build=lambda: models.HDemucs(sources=["voice", "drums"], channels=8, nfft=256, depth=3),
        inputs=lambda batch: {"input": torch.randn(batch, 2, 1024)},
        loss_fn=_mean_square,
        batch=2,
    ),
)
