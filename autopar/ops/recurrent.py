"""One layer and direction of an LSTM, GRU or plain RNN as one operator, with torch's own kernels inside.

Unrolled, a layer is a dozen operators per time step, and a planner gains nothing from seeing them: steps depend on
each other, so only the batch may be split. Capture replaces `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and
`torch.rnn_relu` by `autopar::recurrent_layer`. Backward runs the layer again, which keeps its memory to
the operands; the kernels save buffers in formats of their own, which no other program may hold.

    y, h_n, c_n = recurrent_layer(x (T, B, I), [h_0, c_0] (B, H), [w_ih, w_hh, b_ih, b_hh], "lstm", True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

KERNELS: Mapping[str, Callable[..., Any]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}


@torch.library.custom_op(
    "autopar::recurrent_layer",
    mutates_args=(),
    schema="(Tensor x, Tensor[] state, Tensor[] weights, str mode, bool has_biases, bool reverse) -> Tensor[]",
)
def recurrent_layer(
    x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], mode: str, has_biases: bool, reverse: bool
) -> list[Tensor]:
    """[y (T, B, H), last state...]: the layer over x (T, B, I), from the last step to the first when `reverse`.

    state: [h] (B, H), for an LSTM [h, c]; weights as torch orders them for one layer; mode: a key of `KERNELS`.
    """
    return [part.clone() for part in _run(x, state, weights, mode, has_biases, reverse)]


def _run(
    x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], mode: str, has_biases: bool, reverse: bool
) -> list[Tensor]:
    if not x.shape[1]:  # torch's kernels refuse an empty batch, which an uneven split may leave
        hidden = state[0].shape[-1]
        return [x.new_empty((x.shape[0], 0, hidden)) + 0 * x.sum(), *(part * 1 for part in state)]
    x = x.flip(0) if reverse else x
    initial: Any = [part.unsqueeze(0) for part in state]
    options = (has_biases, 1, 0.0, True, False, False)
    y, *last = KERNELS[mode](x, initial if mode == "lstm" else initial[0], list(weights), *options)
    return [y.flip(0) if reverse else y, *(part.squeeze(0) for part in last)]


@recurrent_layer.register_fake
def _(
    x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], mode: str, has_biases: bool, reverse: bool
) -> list[Tensor]:
    steps, batch, _ = x.shape
    return [x.new_empty((steps, batch, state[0].shape[-1])), *(part.new_empty(part.shape) for part in state)]


@torch.library.custom_op(
    "autopar::recurrent_layer_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor x, Tensor[] state, Tensor[] weights, str mode, bool has_biases, bool reverse)"
    " -> Tensor[]",
)
def recurrent_layer_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    mode: str,
    has_biases: bool,
    reverse: bool,
) -> list[Tensor]:
    """[gradient of x, of each state, of each weight]; `grads` are those of the outputs of `recurrent_layer`."""
    first_weight = 1 + len(state)

    def outputs(*operands: Tensor) -> tuple[Tensor, ...]:
        state, weights = operands[1:first_weight], operands[first_weight:]
        return tuple(_run(operands[0], state, weights, mode, has_biases, reverse))

    # inside an operator autograd records nothing, torch.func does; kernels save their buffers where gradients are on
    with torch.enable_grad():
        pull_back = torch.func.vjp(outputs, x, *state, *weights)[1]
        found = pull_back(tuple(grads))
    return [grad.detach().clone(memory_format=torch.contiguous_format) for grad in found]


@recurrent_layer_backward.register_fake
def _(
    grads: Sequence[Tensor],
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    mode: str,
    has_biases: bool,
    reverse: bool,
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (x, *state, *weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, state, weights, *ctx.options = inputs
    ctx.num_states = len(state)
    ctx.save_for_backward(x, *state, *weights)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    state, weights = rest[: ctx.num_states], rest[ctx.num_states :]
    shapes = [(*x.shape[:2], state[0].shape[-1]), *(part.shape for part in state)]
    given = [x.new_zeros(shape) if g is None else g for g, shape in zip(grads, shapes, strict=True)]
    found = recurrent_layer_backward(given, x, state, weights, *ctx.options)
    first_weight = 1 + len(state)
    return found[0], list(found[1:first_weight]), list(found[first_weight:]), None, None, None


recurrent_layer.register_autograd(_backward, setup_context=_save)
