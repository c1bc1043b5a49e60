"""Attention of torch's own layers and of models with learned biases stays one operator with torch's gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.capture import capture
from autopar.capture.interception import _softmax
from autopar.rules.engine import uncovered
from tests.capture.execute import eager_step, outputs_of, run_program, worst_gradient_error


class Translator(nn.Module):
    """`nn.Transformer` with a causal target mask. forward(source, target (B, S, 16)) -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out: Tensor = self.layers(source, target, tgt_mask=mask)
        return out.pow(2).mean()


class PairBiased(nn.Module):
    """Row attention of an Evoformer block. forward(x (B, R, S, 16), pair (B, S, S, 4)) -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 48)
        self.bias = nn.Linear(4, 2, bias=False)  # a bias of the bias would have gradient 0

    def forward(self, x: Tensor, pair: Tensor) -> Tensor:
        batch, rows, length, _ = x.shape
        parts = (part.view(batch, rows, length, 2, 8).transpose(2, 3) for part in self.projection(x).chunk(3, -1))
        bias = self.bias(pair).permute(0, 3, 1, 2).unsqueeze(1)
        return functional.scaled_dot_product_attention(*parts, attn_mask=bias).pow(2).sum()


def check(model: nn.Module, args: tuple[Tensor, ...], num_operators: int) -> None:
    program = capture(model, args)
    assert not uncovered(program)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("autopar.attention.default") == num_operators
    _, expected, _ = eager_step(model, args, {})
    gradients = outputs_of(program, run_program(program, model, args, {}), "gradient")
    assert worst_gradient_error(gradients, expected) < 1e-5


def test_transformer_with_a_causal_target_mask() -> None:
    check(Translator(), (torch.randn(2, 6, 16), torch.randn(2, 5, 16)), 3)


def test_rows_with_a_learned_pair_bias() -> None:
    check(PairBiased(), (torch.randn(2, 3, 6, 16), torch.randn(2, 6, 6, 4)), 1)


def test_only_a_bool_mask_leaves_zeros_where_it_empties_a_row() -> None:
    scores = torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]])
    kept = torch.tensor([[True, True], [False, False]])
    assert torch.equal(_softmax(scores, kept)[1], torch.zeros(2))
    added = torch.zeros(2, 2).masked_fill(~kept, -torch.inf)
    assert _softmax(scores, added)[1].isnan().all()  # as of torch's attention
    torch.testing.assert_close(_softmax(scores, kept)[0], torch.softmax(scores[0], -1))
