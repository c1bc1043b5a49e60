"""Labels travel from tensors to what is computed from them, through views and in place; factories read nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.capture.labels import DRAW, Labels


def written(x: Tensor, y: Tensor) -> Tensor:
    result = torch.zeros(3)
    result[:2].copy_(x[:2])
    return result


@pytest.mark.parametrize(
    ("follow", "expected"),
    [
        (lambda x, y: x + y, {"x", "y"}),
        (lambda x, y: x.view(3, 1).unbind(0)[1], {"x"}),
        (written, {"x"}),
        (lambda x, y: torch.arange(3.0), set()),
        (lambda x, y: torch.zeros_like(x) + x.new_ones(3), set()),
        (lambda x, y: torch.rand(3) + y, {DRAW, "y"}),
        (lambda x, y: torch.sort(x).indices, {"x"}),
    ],
)
def test_labels_follow_values(follow: Callable[[Tensor, Tensor], Tensor], expected: set[str]) -> None:
    x, y = torch.randn(3), torch.randn(3)
    with Labels() as labels:
        labels.mark({"a": [x]}, "x")
        labels.mark(y, "y")
        found = labels.of({"result": follow(x, y)})
    assert found == expected
