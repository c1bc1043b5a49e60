"""`torch.nn.functional.ctc_loss` as our operator per sample, with torch's reductions around it.

ctc_loss(log_probs, targets[sum(lengths)], ...)   -->   targets[n, s] padded to one width; mean(ctc_loss(...) / lengths)

Speech models of Hugging Face join the labels of all samples by `labels.masked_select(mask)`, whose shape depends on
values. `MaskedElements` stands for such a selection until somebody reads it: for a CTC loss its order is enough; every
other reader gets `source[mask]`, which needs the positions that the mask has in an example (see `branches.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class MaskedElements:
    """The elements of `source` where `mask` holds, in order; how many these are is not known."""

    def __init__(self, source: Tensor, mask: Tensor) -> None:
        self._source, self._mask = source, mask

    def in_front(self) -> Tensor:
        """(numel,): the selected elements, then the others."""
        source, mask = (x.reshape(-1) for x in self._broadcast())
        return source[(~mask).to(torch.uint8).argsort(stable=True)]

    def elements(self) -> Tensor:
        """(number of trues,). Raises DynamicOutputShapeException where the values of the mask are not known."""
        source, mask = self._broadcast()
        return source[mask]

    def _broadcast(self) -> tuple[Tensor, Tensor]:
        shape = torch.broadcast_shapes(self._source.shape, self._mask.shape)  # type: ignore[no-untyped-call]
        return self._source.expand(shape), self._mask.expand(shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.elements(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(MaskedElements, MaskedElements.elements, (args, kwargs or {}))
        return func(*args, **kwargs)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor | MaskedElements,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss`: log_probs (T, N, C) or (T, C); targets (N, S) or all of them in a row."""
    labels = targets.in_front() if isinstance(targets, MaskedElements) else targets
    is_single = log_probs.dim() == 2
    if is_single:
        log_probs, labels = log_probs.unsqueeze(1), labels.reshape(1, -1)
    num_samples, device = log_probs.shape[1], log_probs.device
    inputs = torch.as_tensor(input_lengths, device=device).reshape(num_samples)
    lengths = torch.as_tensor(target_lengths, device=device).reshape(num_samples)
    labels = labels.to(device)
    if labels.dim() == 1:
        labels = _padded(labels, lengths)
    losses: Tensor = torch.ops.autopar.ctc_loss(log_probs, labels, inputs, lengths, blank, zero_infinity)
    if reduction == "mean":
        return (losses / lengths.clamp(min=1)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses.squeeze(0) if is_single else losses


def _padded(labels: Tensor, lengths: Tensor) -> Tensor:
    """(sum of lengths or more,) -> (N, S): row i starts with the labels of sample i; S fits always."""
    starts = lengths.cumsum(0) - lengths
    columns = torch.arange(labels.shape[0], device=labels.device)
    positions = starts.unsqueeze(1) + columns
    return labels[positions.clamp(max=labels.shape[0] - 1)]
