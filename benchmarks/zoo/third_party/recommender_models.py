"""deepctr-torch: click-through rates from dense and categorical columns."""

from __future__ import annotations

from typing import Any

import torch
from deepctr_torch import models
from deepctr_torch.inputs import DenseFeat, SparseFeat
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("deepctr_torch", "sklearn")
_COLUMNS = [SparseFeat(f"c{i}", vocabulary_size=20, embedding_dim=8) for i in range(4)]
_COLUMNS += [DenseFeat(f"d{i}", 1) for i in range(3)]


def _rows(batch: int) -> Inputs:
    categories, numbers = torch.randint(0, 20, (batch, 4)).float(), torch.rand(batch, 3)
    return {"X": torch.cat([categories, numbers], 1), "labels": torch.randint(0, 2, (batch, 1)).float()}


def _clicks(output: Any, batch: Inputs) -> Tensor:
    return functional.binary_cross_entropy(output, batch["labels"])


def _entry(name: str, **arguments: Any) -> ZooEntry:
    def build() -> nn.Module:
        model: nn.Module = getattr(models, name)(_COLUMNS, _COLUMNS, device="cpu", **arguments)
        return model

    return ZooEntry(
        name=f"deepctr_torch/{name}", family="tabular", build=build, inputs=_rows, batch=16, loss_fn=_clicks
    )


ENTRIES = (
    _entry("DeepFM", dnn_hidden_units=(32, 16)),
    _entry("xDeepFM", dnn_hidden_units=(32, 16), cin_layer_size=(8, 8)),
    _entry("DCN", dnn_hidden_units=(32, 16)),
    _entry("WDL", dnn_hidden_units=(32, 16)),
    _entry("AutoInt", dnn_hidden_units=(32, 16), att_head_num=2),
    _entry("FiBiNET", dnn_hidden_units=(32, 16)),
    _entry("NFM", dnn_hidden_units=(32, 16)),
    _entry("ONN", dnn_hidden_units=(32, 16)),
)
