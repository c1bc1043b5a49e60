"""Fake twins of a model's tensors: shapes and dtypes without storage, so that a trace costs no memory.

    with fake_parameters(model, mode):
        ...  # every parameter and buffer is a fake CPU tensor; tied ones stay tied
    # the model holds its own tensors again

Works for models on any device, `meta` included, and never reads or copies a value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autopar._compat import FakeTensor, FakeTensorMode


def fake_twin(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake CPU tensor with the shape, strides, dtype and requires_grad of `tensor`."""
    with mode:
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def fake_parameters(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Replace the parameters and buffers of `model` by fake twins, and put them back afterwards."""
    twins: dict[int, Tensor] = {}
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                saved.append((tensors, dict(tensors)))
                for name, tensor in tensors.items():
                    tensors[name] = _twin_of(tensor, twins, mode)
            if isinstance(module, nn.RNNBase):  # it keeps a second list of its weights
                saved.append((module.__dict__, {"_flat_weights": module._flat_weights}))
                module.__dict__["_flat_weights"] = [_twin_of(w, twins, mode) for w in module._flat_weights]
        yield
    finally:
        for tensors, original in saved:
            tensors.update(original)


def _twin_of(tensor: Tensor | None, twins: dict[int, Tensor], mode: FakeTensorMode) -> Any:
    if tensor is None or (isinstance(tensor, FakeTensor) and tensor.fake_mode is mode):
        return tensor
    if id(tensor) not in twins:
        twins[id(tensor)] = fake_twin(tensor, mode)
    return twins[id(tensor)]
