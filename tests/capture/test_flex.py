"""flex_attention is captured as our attention or as formulas, and trains like torch's own operator."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from autopar.capture import capture
from autopar.rules.engine import uncovered
from tests.capture.execute import eager_step, outputs_of, run_program, worst_gradient_error

KINDS = ("plain", "causal", "score", "softcap", "logsumexp", "compiled")
compiled_attention = torch.compile(flex.flex_attention)


class Flexible(nn.Module):
    """Grouped attention of one kind. forward(x (B, 8, 16)) -> loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.projection = nn.Linear(16, 32, bias=False)
        self.relative = nn.Parameter(torch.randn(4, 15))
        self.register_buffer("slopes", torch.rand(4))

    def options(self, batch: int, length: int) -> dict[str, Any]:
        if self.kind in ("causal", "compiled"):
            seen = flex.create_block_mask(
                lambda b, h, i, j: (j <= i) & (i - j < 5), None, None, length, length, device="cpu"
            )
            return {"block_mask": seen}
        if self.kind == "score":
            return {"score_mod": lambda s, b, h, i, j: s + self.slopes[h] * (j - i) + self.relative[h, i - j + 7]}
        if self.kind == "softcap":
            before = flex.create_block_mask(lambda b, h, i, j: j < i, batch, None, length, length, device="cpu")
            return {"score_mod": lambda s, b, h, i, j: 5 * torch.tanh(s / 5), "block_mask": before}
        return {"return_lse": True} if self.kind == "logsumexp" else {}

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.projection(x).split([16, 8, 8], -1)
        query = query.view(batch, length, 4, 4).transpose(1, 2)
        key, value = (part.reshape(batch, length, 2, 4).transpose(1, 2) for part in (key, value))
        is_compiled = self.kind == "compiled" and torch.compiler.is_exporting()
        attention = compiled_attention if is_compiled else flex.flex_attention
        out = attention(query, key, value, enable_gqa=True, **self.options(batch, length))
        parts = out if isinstance(out, tuple) else (out,)
        return sum((part.pow(2).sum() for part in parts), torch.zeros(()))


@pytest.mark.exhaustive(sample=["score", "causal"])
@pytest.mark.parametrize("kind", KINDS)
def test_flex_attention_trains_like_torchs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings.simplefilter("ignore")  # torch says that the uncompiled form is slow
    model, x = Flexible(kind), torch.randn(2, 8, 16)
    program = capture(model, (x,))
    assert not uncovered(program)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # torch refuses gradients on a CPU, and has them
    _, expected, _ = eager_step(model, (x,), {})
    values = run_program(program, model, (x,), {})
    gradients = outputs_of(program, values, "gradient")
    assert worst_gradient_error({name: gradients[name] for name in expected}, expected) < 1e-6


@pytest.mark.exhaustive(sample="plain-True")
@pytest.mark.parametrize(("kind", "is_one_operator"), [("plain", True), ("causal", True), ("softcap", False)])
def test_a_mask_needs_no_formulas(kind: str, is_one_operator: bool) -> None:
    warnings.simplefilter("ignore")
    program = capture(Flexible(kind), (torch.randn(2, 8, 16),))
    targets = {str(node.target) for node in program.graph.nodes}
    assert ("autopar.attention.default" in targets) == is_one_operator
