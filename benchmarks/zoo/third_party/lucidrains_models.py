"""Packages of one author, a paper each: cheaper attentions, codebooks, experts, sets, molecules and genomes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from egnn_pytorch import EGNN_Network
from enformer_pytorch import Enformer, EnformerConfig
from linformer import LinformerLM
from local_attention import LocalTransformer
from perceiver_pytorch import Perceiver, PerceiverIO
from performer_pytorch import PerformerLM
from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer
from reformer_pytorch import ReformerLM
from routing_transformer import RoutingTransformerLM
from se3_transformer_pytorch import SE3Transformer
from soft_moe_pytorch import SoftMoE
from st_moe_pytorch import MoE, SparseMoEBlock
from tab_transformer_pytorch import FTTransformer, TabTransformer
from torch import Tensor, nn
from torch.nn import functional
from vector_quantize_pytorch import FSQ, LFQ, ResidualVQ, VectorQuantize

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = (
    "egnn_pytorch",
    "enformer_pytorch",
    "linformer",
    "local_attention",
    "perceiver_pytorch",
    "performer_pytorch",
    "recurrent_memory_transformer_pytorch",
    "reformer_pytorch",
    "routing_transformer",
    "se3_transformer_pytorch",
    "soft_moe_pytorch",
    "st_moe_pytorch",
    "tab_transformer_pytorch",
    "vector_quantize_pytorch",
)
TOKENS, LENGTH, WIDTH = 32, 16, 32
TABLE = {"categories": (4, 5, 6), "num_continuous": 5, "dim": 16, "depth": 2, "heads": 4, "dim_head": 4}


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _mean_square(output: Any, batch: Inputs) -> Tensor:
    return _first(output).square().mean()


def _next_token(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(_first(output)[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())


def _classes(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(_first(output), batch["labels"])


def _ids(batch: int) -> Inputs:
    return {"x": torch.randint(0, TOKENS, (batch, LENGTH))}


def _features(batch: int) -> Inputs:
    return {"x": torch.randn(batch, LENGTH, WIDTH)}


def _table(batch: int, continuous: str) -> Inputs:
    categories = torch.stack([torch.randint(0, size, (batch,)) for size in (4, 5, 6)], dim=1)
    return {"x_categ": categories, continuous: torch.randn(batch, 5), "labels": torch.randint(0, 3, (batch,))}


class _Quantised(nn.Module):
    """An autoencoder around a codebook, so that the codebook's input is learned."""

    def __init__(self, codebook: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.codebook = codebook

    def forward(self, x: Tensor) -> Tensor:
        quantised, *others = self.codebook(self.encoder(x))
        loss: Tensor = functional.mse_loss(self.decoder(quantised), x)
        for other in others:
            if other is not None and other.is_floating_point():
                loss = loss + other.sum()
        return loss


def _molecules(batch: int) -> Inputs:
    return {"feats": torch.randint(0, 8, (batch, 8)), "coors": torch.randn(batch, 8, 3)}


def _se3(**options: Any) -> nn.Module:
    model: nn.Module = SE3Transformer(dim=8, heads=2, dim_head=4, depth=1, num_degrees=2, num_tokens=8, **options)
    return model


def _enformer() -> nn.Module:
    """As in one process: in several it takes SyncBatchNorm, which has no kernel for CPUs."""
    config = EnformerConfig(
        dim=48,
        depth=1,
        heads=2,
        output_heads={"human": 5},
        target_length=4,
        attn_dim_key=8,
        dropout_rate=0.0,
        attn_dropout=0.0,
        pos_dropout=0.0,
        num_downsamples=3,
        dim_divisible_by=2,
    )
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        model: nn.Module = Enformer(config)
    return model


def _genome_loss(output: Any, batch: Inputs) -> Tensor:
    return functional.poisson_nll_loss(output["human"], batch["counts"], log_input=False)


def _entry(
    name: str,
    build: Callable[[], nn.Module],
    inputs: Callable[[int], Inputs] = _ids,
    loss_fn: Callable[[Any, Any], Tensor] | None = _next_token,
    **others: Any,
) -> ZooEntry:
    return ZooEntry(name=name, build=build, inputs=inputs, loss_fn=loss_fn, **{"family": "causal", **others})


SIZES = {"num_tokens": TOKENS, "dim": WIDTH, "depth": 2, "heads": 4}

def _routing() -> nn.Module:
    model: nn.Module = RoutingTransformerLM(
        **SIZES, dim_head=8, max_seq_len=LENGTH, window_size=4, causal=True, num_mem_kv=1, _register_kmeans_update=False
    )
    for name, buffer in model.named_buffers():
        if name.endswith("initted"):
            buffer.fill_(True)
    return model


ENTRIES = (
    _entry(
        "local_attention/transformer",
        lambda: LocalTransformer(**SIZES, dim_head=8, max_seq_len=LENGTH, local_attn_window_size=4, use_xpos=True),
    ),
    _entry(
        "local_attention/dynamic_bias",
        lambda: LocalTransformer(
            **SIZES, dim_head=8, max_seq_len=LENGTH, local_attn_window_size=4, use_dynamic_pos_bias=True
        ),
    ),
    _entry("linformer/lm", lambda: LinformerLM(**SIZES, seq_len=LENGTH, k=8), family="masked"),
    _entry(
        "linformer/reversible_shared",
        lambda: LinformerLM(**SIZES, seq_len=LENGTH, k=8, reversible=True, share_kv=True, one_kv_head=True),
        family="masked",
    ),
    _entry(
        "performer_pytorch/causal",
        lambda: PerformerLM(**SIZES, dim_head=8, max_seq_len=LENGTH, nb_features=16, generalized_attention=True),
        branches="example",
    ),
    _entry(
        "performer_pytorch/local_heads",
        lambda: PerformerLM(
            **SIZES, dim_head=8, max_seq_len=LENGTH, nb_features=16, local_attn_heads=2, local_window_size=4
        ),
        family="masked",
        branches="example",
    ),
    _entry(
        "reformer_pytorch/full_attention",
        lambda: ReformerLM(
            **SIZES, dim_head=8, max_seq_len=LENGTH, causal=True, use_full_attn=True, ff_chunks=2, reverse_thres=LENGTH
        ),
    ),
    _entry(
        "reformer_pytorch/lsh",
        lambda: ReformerLM(
            **SIZES, dim_head=8, max_seq_len=LENGTH, bucket_size=4, n_hashes=2, causal=True, reverse_thres=LENGTH
        ),
        notes="its hashes are drawn: it differs from itself",
        dtype=torch.float64,
    ),
    _entry(
        "reformer_pytorch/reversible",
        lambda: ReformerLM(**SIZES, dim_head=8, max_seq_len=LENGTH, causal=True, use_full_attn=True),
        notes="its backward calls backward, which adds to .grad beside the graph",
    ),
    _entry(
        "routing_transformer/lm",
        _routing,
        dtype=torch.float64,
        branches="example",
        notes="as after its first batch, which sets the means of its clusters",
    ),
    _entry(
        "recurrent_memory_transformer_pytorch/lm",
        lambda: RecurrentMemoryTransformer(**SIZES, dim_head=8, num_memory_tokens=4, seq_len=LENGTH),
    ),
    _entry(
        "vector_quantize_pytorch/vq",
        lambda: _Quantised(VectorQuantize(8, codebook_size=16, rotation_trick=False, sync_codebook=False)),
        _features,
        None,
        family="plain",
        dtype=torch.float64,
        branches="example",
    ),
    _entry(
        "vector_quantize_pytorch/learnable_codebook",
        lambda: _Quantised(VectorQuantize(8, codebook_size=16, learnable_codebook=True, ema_update=False)),
        _features,
        None,
        family="plain",
        dtype=torch.float64,
        branches="example",
    ),
    _entry(
        "vector_quantize_pytorch/residual_vq",
        lambda: _Quantised(ResidualVQ(dim=8, num_quantizers=2, codebook_size=16, sync_codebook=False)),
        _features,
        None,
        family="plain",
        dtype=torch.float64,
        branches="example",
    ),
    _entry(
        "vector_quantize_pytorch/fsq",
        lambda: _Quantised(FSQ(levels=[8, 5, 5], dim=8)),
        _features,
        None,
        family="plain",
        dtype=torch.float64,
    ),
    _entry(
        "vector_quantize_pytorch/lfq",
        lambda: _Quantised(LFQ(dim=8, codebook_size=16, force_quantization_f32=False)),
        _features,
        None,
        family="plain",
        dtype=torch.float64,
        branches="example",
    ),
    _entry(
        "soft_moe_pytorch/soft_moe",
        lambda: SoftMoE(WIDTH, seq_len=LENGTH, num_experts=4, geglu=True, is_distributed=False),
        _features,
        _mean_square,
        family="mixture-of-experts",
        branches="example",
    ),
    _entry(
        "st_moe_pytorch/sparse_block",
        lambda: SparseMoEBlock(
            MoE(WIDTH, num_experts=4, threshold_train=0.0, is_distributed=False), add_ff_before=True, add_ff_after=True
        ),
        _features,
        lambda output, batch: output.outputs.square().mean() + output.total_aux_loss,
        family="mixture-of-experts",
        branches="example",
        dtype=torch.float64,
    ),
    _entry(
        "tab_transformer_pytorch/tab_transformer",
        lambda: TabTransformer(**TABLE, dim_out=3, mlp_act=nn.ReLU()),
        partial(_table, continuous="x_cont"),
        _classes,
        family="tabular",
        branches="example",
    ),
    _entry(
        "tab_transformer_pytorch/ft_transformer",
        lambda: FTTransformer(**TABLE, dim_out=3),
        partial(_table, continuous="x_numer"),
        _classes,
        family="tabular",
    ),
    _entry(
        "perceiver_pytorch/perceiver",
        lambda: Perceiver(
            num_freq_bands=3,
            depth=2,
            max_freq=8.0,
            num_latents=8,
            latent_dim=WIDTH,
            latent_heads=4,
            cross_dim_head=8,
            latent_dim_head=8,
            num_classes=10,
            weight_tie_layers=True,
        ),
        lambda batch: {"data": torch.randn(batch, 8, 8, 3), "labels": torch.randint(0, 10, (batch,))},
        _classes,
        family="multimodal",
    ),
    _entry(
        "perceiver_pytorch/perceiver_io",
        lambda: PerceiverIO(
            depth=2,
            dim=WIDTH,
            queries_dim=16,
            logits_dim=10,
            num_latents=8,
            latent_dim=WIDTH,
            latent_heads=4,
            cross_dim_head=8,
            latent_dim_head=8,
        ),
        lambda batch: {"data": torch.randn(batch, LENGTH, WIDTH), "queries": torch.randn(batch, 6, 16)},
        _mean_square,
        family="multimodal",
    ),
    _entry(
        "egnn_pytorch/network",
        lambda: EGNN_Network(num_tokens=8, dim=16, depth=2, num_nearest_neighbors=3, norm_coors=True),
        _molecules,
        _mean_square,
        family="graph",
        dtype=torch.float64,
    ),
    _entry(
        "egnn_pytorch/global_attention",
        lambda: EGNN_Network(
            num_tokens=8, num_positions=8, dim=16, depth=2, global_linear_attn_every=1, coor_weights_clamp_value=2.0
        ),
        _molecules,
        _mean_square,
        family="graph",
    ),
    _entry("se3_transformer_pytorch/se3", _se3, _molecules, _mean_square, family="graph", batch=2, branches="example"),
    _entry(
        "se3_transformer_pytorch/neighbours",
        lambda: _se3(num_neighbors=4, one_headed_key_values=True),
        _molecules,
        _mean_square,
        family="graph",
        batch=2,
        dtype=torch.float64,
        branches="example",
    ),
    _entry(
        "enformer_pytorch/enformer",
        _enformer,
        lambda batch: {"x": torch.eye(4)[torch.randint(0, 4, (batch, 64))], "counts": torch.rand(batch, 4, 5)},
        _genome_loss,
        family="series",
    ),
)
