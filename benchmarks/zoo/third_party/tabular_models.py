"""pytorch-tabnet and rtdl-revisiting-models: models of tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pytorch_tabnet.tab_network import TabNet
from rtdl_revisiting_models import MLP, FTTransformer, ResNet
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("pytorch_tabnet", "rtdl_revisiting_models")
FEATURES, CLASSES = 8, 3
GROUPS = torch.eye(FEATURES)


def _rows(batch: int) -> Inputs:
    return {"x": torch.randn(batch, FEATURES), "labels": torch.randint(0, CLASSES, (batch,))}


def _rows_and_categories(batch: int) -> Inputs:
    return {
        "x_cont": torch.randn(batch, FEATURES),
        "x_cat": torch.stack([torch.randint(0, size, (batch,)) for size in (4, 7)], dim=1),
        "labels": torch.randint(0, CLASSES, (batch,)),
    }


def _rows_with_categories(batch: int) -> Inputs:
    rows = _rows(batch)
    rows["x"][:, 1] = torch.randint(0, 4, (batch,)).float()
    return rows


def _cross_entropy(output: Tensor, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output, batch["labels"])


def _tabnet_loss(output: Any, batch: Inputs) -> Tensor:
    logits, sparsity = output
    loss: Tensor = functional.cross_entropy(logits, batch["labels"]) - 1e-3 * sparsity
    return loss


def _entry(
    name: str,
    build: Callable[[], nn.Module],
    loss_fn: Callable[[Any, Any], Tensor] = _cross_entropy,
    inputs: Callable[[int], Inputs] = _rows,
    **others: Any,
) -> ZooEntry:
    return ZooEntry(name=name, family="tabular", build=build, inputs=inputs, loss_fn=loss_fn, **others)


SIZES = {"n_d": 8, "n_a": 8, "n_steps": 2, "group_attention_matrix": GROUPS}

ENTRIES = (
    _entry("pytorch_tabnet/sparsemax", lambda: TabNet(FEATURES, CLASSES, **SIZES), _tabnet_loss, batch=8),
    _entry(
        "pytorch_tabnet/entmax_categories",
        lambda: TabNet(
            FEATURES,
            CLASSES,
            mask_type="entmax",
            cat_idxs=[1],
            cat_dims=[4],
            cat_emb_dim=[2],
            **SIZES,
        ),
        _tabnet_loss,
        _rows_with_categories,
        batch=8,
        branches="example",
    ),
    _entry(
        "pytorch_tabnet/ghost_batches",
        lambda: TabNet(
            FEATURES, CLASSES, virtual_batch_size=16, **{**SIZES, "group_attention_matrix": GROUPS.double()}
        ),
        _tabnet_loss,
        batch=32,
        dtype=torch.float64,
        notes="in fp32 batch norms of few rows amplify rounding to 1.0e-05, the most that is allowed",
    ),
    _entry(
        "rtdl_revisiting_models/mlp",
        lambda: MLP(d_in=FEATURES, d_out=CLASSES, n_blocks=2, d_block=16, dropout=0.0),
        batch=8,
    ),
    _entry(
        "rtdl_revisiting_models/resnet",
        lambda: ResNet(
            d_in=FEATURES,
            d_out=CLASSES,
            n_blocks=2,
            d_block=16,
            d_hidden_multiplier=2.0,
            dropout1=0.0,
            dropout2=0.0,
        ),
        batch=8,
    ),
    _entry(
        "rtdl_revisiting_models/ft_transformer",
        lambda: FTTransformer(
            n_cont_features=FEATURES,
            cat_cardinalities=[4, 7],
            d_out=CLASSES,
            n_blocks=2,
            d_block=16,
            attention_n_heads=4,
            attention_dropout=0.0,
            ffn_d_hidden_multiplier=2.0,
            ffn_dropout=0.0,
            residual_dropout=0.0,
        ),
        inputs=_rows_and_categories,
    ),
    _entry(
        "rtdl_revisiting_models/linformer",
        lambda: FTTransformer(
            n_cont_features=FEATURES,
            cat_cardinalities=[4, 7],
            d_out=CLASSES,
            n_blocks=2,
            d_block=16,
            attention_n_heads=4,
            attention_dropout=0.0,
            ffn_d_hidden_multiplier=2.0,
            ffn_dropout=0.0,
            residual_dropout=0.0,
            linformer_kv_compression_ratio=0.5,
            linformer_kv_compression_sharing="headwise",
        ),
        inputs=_rows_and_categories,
    ),
)
