"""nn.LSTM, nn.GRU and nn.RNN are captured as one operator per layer and direction, with torch's gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.rules.engine import uncovered
from tests.capture.execute import eager_step, outputs_of, run_program, worst_gradient_error


class Reader(nn.Module):
    """A recurrent module under a loss of all its outputs."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.layers(x)
        states = last if isinstance(last, tuple) else (last,)
        return sum((state.pow(3).sum() for state in states), y.pow(2).sum())


LAYERS = {
    "lstm": (lambda: nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True), 4),
    "gru": (lambda: nn.GRU(5, 4, 2), 2),
    "rnn": (lambda: nn.RNN(5, 4, nonlinearity="relu", bias=False), 1),
    "projected": (lambda: nn.LSTM(5, 4, proj_size=2), 1),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_recurrent_layers_train_like_torchs(kind: str) -> None:
    build, num_operators = LAYERS[kind]
    model, x = Reader(build()), torch.randn(6, 7, 5)
    program = capture(model, (x,))
    assert not uncovered(program)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("autopar.recurrent_layer.default") == num_operators
    _, expected, _ = eager_step(model, (x,), {})
    with torch.no_grad():  # as in a backward pass
        values = run_program(program, model, (x,), {})
    gradients = outputs_of(program, values, "gradient")
    assert worst_gradient_error(gradients, expected) < 1e-6


def test_dropout_between_layers_is_our_operator() -> None:
    program = capture(Reader(nn.LSTM(5, 4, 3, dropout=0.3)), (torch.randn(6, 7, 5),))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("autopar.dropout.default") == 2


def test_packed_sequences_are_refused_with_advice() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(5, 4)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
            return self.layers(packed)[0].data.sum()

    with pytest.raises(CaptureError, match="padded tensor"):
        capture(Packed(), (torch.randn(6, 2, 5), torch.tensor([6, 3])))
