"""Rules of recurrent layers: the batch is split, and leaves Partial(sum) in the gradients of the weights.

Time steps and the hidden units of a step depend on all others of the step before, so these dims stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.rules.call import Call


def _recurrent_layer(call: Call) -> str:
    x, state, weights = _tensors(call)
    return f"{x}, {state}, {weights} -> {_outputs(call)} ; flops: {_flops(call, 2)}"


def _recurrent_layer_backward(call: Call) -> str:
    """The layer again, then its gradients of inputs and of weights."""
    x, state, weights = _tensors(call)
    return f"{_outputs(call)}, {x}, {state}, {weights} -> {x}, {state}, {weights} ; flops: {_flops(call, 6)}"


def _tensors(call: Call) -> tuple[str, str, str]:
    state = ", ".join(["b [...]"] * len(call.argument("state")))
    return "[t] b [i]", state, ", ".join(["[...]"] * len(call.argument("weights")))


def _outputs(call: Call) -> str:
    return ", ".join(["[t] b [r]", *["b [...]"] * len(call.argument("state"))])


def _flops(call: Call, per_weight: int) -> str:
    """Every matrix meets every element of the batch at every step."""
    matrices = [spec.shape for spec in call.argument("weights") if len(spec.shape) == 2]
    return " + ".join(f"{per_weight}*t*b*{rows}*{columns}" for rows, columns in matrices)


RECURRENT_RULES: Mapping[str, Callable[[Call], str | None]] = {
    "autopar.recurrent_layer": _recurrent_layer,
    "autopar.recurrent_layer_backward": _recurrent_layer_backward,
}
