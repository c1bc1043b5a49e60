"""nn.LSTM, nn.GRU and nn.RNN while a model is traced: one `autopar::recurrent_layer` per layer and direction.

torch.lstm(x, (h, c), weights, True, 2, 0.1, True, True, False)
    -->  layer 0 forward, layer 0 backward, cat, dropout, layer 1 forward, layer 1 backward, cat
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CaptureError
from autopar.ops.recurrent import KERNELS

MODES: Mapping[Callable[..., Any], str] = dict(zip(KERNELS.values(), KERNELS, strict=True))
"""torch's function of a whole stack of layers -> mode of `recurrent_layer`."""

_PACKED = (
    "a packed sequence has the lengths of its data in its shape, so it cannot be captured; run the recurrent layers "
    "on the padded tensor, without pack_padded_sequence, and mask the loss with the lengths"
)


def refuse_packed(*_: Any, **__: Any) -> None:
    """Stands in for `torch._pack_padded_sequence`. Raises CaptureError."""
    raise CaptureError(_PACKED)


def recurrent_stack(
    mode: str,
    dropout: Callable[[Tensor, float, bool], Tensor],
    x: Tensor,
    initial: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor] | Tensor,
    has_biases: bool | Sequence[Tensor],
    num_layers: int,
    dropout_p: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[Tensor, ...]:
    """What `torch.lstm` and its like return: (y, h_n[, c_n]) with states (layers * directions, B, H).

    dropout: `dropout(x, p, training)`, applied between layers. Raises CaptureError for packed sequences, whose data
    and lengths are the first two arguments.
    """
    if not isinstance(has_biases, bool) or isinstance(weights, Tensor):
        raise CaptureError(_PACKED)
    states = list(initial) if mode == "lstm" else [initial]
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // (num_layers * directions)
    last: list[list[Tensor]] = []
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            state = [part[at] for part in states]
            own = list(weights[at * per_layer : (at + 1) * per_layer])
            out, *after = torch.ops.autopar.recurrent_layer(x, state, own, mode, has_biases, direction == 1)
            outputs.append(out)
            last.append(after)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        x = dropout(x, dropout_p, train) if layer < num_layers - 1 else x
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.stack(list(parts)) for parts in zip(*last, strict=True))
