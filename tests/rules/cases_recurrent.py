"""Cases of recurrent layers: every mode, with and without biases, both directions, a projected LSTM."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.rules.case_values import Arguments, Case, autopar_ops, case, x

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _layer(mode: str, biases: bool, reverse: bool, projection: int = 0) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        gates, size = GATES[mode] * 4, projection or 4
        weights = [x(gates, 3), x(gates, size)]
        weights += [x(gates), x(gates)] if biases else []
        weights += [x(projection, 4)] if projection else []
        state = [x(s, size), x(s, 4)] if mode == "lstm" else [x(s, size)]
        return x(5, s, 3), state, weights, mode, biases, reverse

    return build


def _backward(forward: Callable[[int], Arguments]) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        operands = forward(s)
        grads: list[Tensor] = [x(*out.shape) for out in autopar_ops.recurrent_layer.default(*operands)]
        return grads, *operands

    return build


LAYERS = {
    "lstm": _layer("lstm", True, False),
    "lstm_reversed": _layer("lstm", False, True),
    "lstm_projected": _layer("lstm", True, False, projection=2),
    "gru": _layer("gru", True, True),
    "rnn_tanh": _layer("rnn_tanh", True, False),
    "rnn_relu": _layer("rnn_relu", False, False),
}

CASES: list[Case] = [
    *[case(autopar_ops.recurrent_layer.default, build, label) for label, build in LAYERS.items()],
    *[case(autopar_ops.recurrent_layer_backward.default, _backward(build), label) for label, build in LAYERS.items()],
]
