"""Arguments and outputs as trees of tensors: dataclasses are made known to torch, other containers are refused.

@dataclass
class Batch:            a tree of its fields, by `torch.utils._pytree.register_dataclass`, done here
    tokens: Tensor

class Request:          an object with tensors inside is one opaque leaf: its tensors would be frozen in the graph,
    tokens = ...        so it is a CaptureError
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar._compat import is_registered, register_dataclass, tree_leaves
from autopar.errors import CaptureError

_QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def register_structures(value: Any, what: str) -> None:
    """Make every dataclass in `value` a tree of its fields. what: "argument" or "output", for the message.

    Raises CaptureError for other objects that hold tensors.
    """
    _visit(value, what, set())


def _visit(value: Any, where: str, seen: set[int]) -> None:
    if isinstance(value, (Tensor, str, bytes, int, float, type(None))) or id(value) in seen:
        return
    seen.add(id(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        _register(type(value), where)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        for field in dataclasses.fields(value):
            _visit(getattr(value, field.name, None), f"{where}.{field.name}", seen)
    elif isinstance(value, Mapping) and is_registered(type(value)):
        for key, item in value.items():
            _visit(item, f"{where}[{key!r}]", seen)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _visit(item, f"{where}[{index}]", seen)
    elif not is_registered(type(value)) and _hides_tensors(value):
        raise CaptureError(
            f"{where} is a {type(value).__name__} that holds tensors, but its structure is unknown: use a dict, a "
            "tuple or a dataclass, or register the class with torch.utils._pytree.register_pytree_node"
        )


def _register(kind: type, where: str) -> None:
    if is_registered(kind):
        return
    hidden = [field.name for field in dataclasses.fields(kind) if not field.init]
    if hidden:
        raise CaptureError(
            f"{where} is a {kind.__name__}, whose field {hidden[0]} is not an argument of its __init__, so it cannot "
            "be rebuilt: make it an argument, or register the class with torch.utils._pytree.register_pytree_node"
        )
    register_dataclass(kind)


def _hides_tensors(value: Any) -> bool:
    inside = getattr(value, "__dict__", None)
    return isinstance(inside, dict) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(inside))


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise CaptureError for a tensor that no graph can take: empty, nested, sparse or quantised."""
    if tensor.is_nested:
        raise CaptureError(
            f"{name} is a nested tensor: pass a padded tensor and a mask (torch.nested.to_padded_tensor)"
        )
    if tensor.layout != torch.strided:
        raise CaptureError(f"{name} is a sparse tensor ({tensor.layout}): make it dense with .to_dense()")
    if tensor.dtype in _QUANTISED:
        raise CaptureError(
            f"{name} is quantised ({tensor.dtype}): quantised models do not train; pass the model in bf16 or fp32"
        )
    if tensor.numel() == 0:
        raise CaptureError(
            f"{name} has shape {tuple(tensor.shape)}, which holds no element: there is nothing to compute; pass at "
            "least one sample"
        )
