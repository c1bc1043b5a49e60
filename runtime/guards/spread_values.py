"""Spread values: numbers and copies of DTensors are those of the whole value.

    weight.grad.norm().item()           torch: this rank's part of the sum           here: that of all ranks
    f"{weight.grad.norm():.3f}"         torch: TypeError                             here: the number
    weight.grad.flatten().numpy()       torch: an error                              here: the whole array
    plain.load_state_dict(module.state_dict())      torch: an error                  here: the whole weights

torch's DTensor hands out the number of a rank where an operator left a partial sum, without a word. Its table of own
operators is the place where that is put right, for every DTensor of the process: what was right before stays, and no
step of an optimizer takes another way. All ranks read, or the one that does is told (`collectives/common_reads.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar._compat import dtensor, dtensor_operators
from autopar.runtime.collectives.common_reads import read_together
from autopar.runtime.parameters import block_of, full_tensor


@functools.cache
def read_whole_values() -> None:
    """From now on, in this process."""
    aten = torch.ops.aten
    dtensor_operators()[aten._local_scalar_dense.default] = _number
    dtensor_operators()[aten.copy_.default] = _copied
    for name, method in (("numpy", _numpy), ("tolist", _tolist), ("__format__", _format), ("__deepcopy__", _deepcopy)):
        setattr(DTensor, name, method)


def _whole(tensor: DTensor, what: str) -> torch.Tensor:
    """On every rank. what: is done with it, for messages."""
    if all(placement.is_replicate() for placement in tensor.placements):
        return tensor._local_tensor
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    read_together(f"{what} of a {tuple(tensor.shape)} tensor that lies across them", ranks)
    return full_tensor(tensor)


def _number(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _whole(args[0], "the value").item()


def _copied(operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, DTensor):
        operator(target, _whole(source, "a copy"), *args[2:], **kwargs)
        return target
    if isinstance(source, DTensor) and (source.shape, source.placements) == (target.shape, target.placements):
        part = source._local_tensor
    else:
        part = block_of(target, full_tensor(source).expand(target.shape))
    operator(target._local_tensor, part, *args[2:], **kwargs)
    return target


def _numpy(self: DTensor, **options: Any) -> Any:
    if self.requires_grad:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    return _whole(self, "the array").numpy(**options)


def _tolist(self: DTensor) -> Any:
    return _whole(self, "the list").tolist()


def _format(self: DTensor, spec: str) -> str:
    return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


def _deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
    """As of a tensor. torch takes one whose block lies inside of a larger one, as a bucket's gradients do, for a tensor
    with memory of its own, and fails."""
    if self.data_ptr() and id(self) not in memo:
        alone = dtensor(self._local_tensor.detach().clone(), self._spec).requires_grad_(self.requires_grad)
        memo[id(self)] = torch.Tensor.__deepcopy__(alone, memo)  # type: ignore[no-untyped-call]
    return torch.Tensor.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
