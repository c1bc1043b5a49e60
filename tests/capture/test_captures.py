"""Further sizes of a model are computed from two traces, equal a fresh trace, and are traced where they would not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Captures, capture, fingerprint
from tests.capture.small_models import FAST


def at(captures: Captures, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Capture through `captures`; whether the program equals that of a fresh trace."""
    program = captures.capture(
        model, args, kwargs, loss_fn=None, batch=None, batch_dims=None, training=True, precision=None
    )
    return fingerprint(program) == fingerprint(capture(model, args, kwargs, training=True))


def sized(tensors: dict[str, Tensor], dim: int, size: int) -> dict[str, Tensor]:
    shapes = {name: [size if d == dim else s for d, s in enumerate(t.shape)] for name, t in tensors.items()}
    return {name: torch.empty(shapes[name], dtype=t.dtype, device="meta") for name, t in tensors.items()}


@pytest.mark.exhaustive(sample="batch")
@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "sequence"])
def test_the_third_size_is_computed_and_equals_a_fresh_trace(dim: int) -> None:
    model, _, kwargs = FAST["gpt2"]()
    captures = Captures()
    for size in (8, 4, 6, 3):
        assert at(captures, model.train(), (), sized(kwargs, dim, size))
    assert (captures.traces, captures.computed) == (2, 2)


def test_lengths_are_computed_at_the_batch_at_which_two_were_traced_whatever_was_traced_first() -> None:
    model, captures = nn.Sequential(nn.Linear(4, 4), Mean()), Captures()
    for batch, length in ((8, 6), (4, 6), (8, 5), (8, 7), (2, 6), (4, 7)):
        assert at(captures, model, (torch.empty(batch, length, 4),), {})
    assert (captures.traces, captures.computed) == (4, 2)
    assert at(captures, model, (torch.empty(4, 9, 4),), {})
    assert captures.computed == 3


def test_size_one_is_traced() -> None:
    model, _, _ = FAST["mlp"]()
    captures = Captures()
    for size in (8, 1, 4, 2, 6, 1):
        assert at(captures, model, (torch.empty(size, 32), torch.empty(size, dtype=torch.long)), {})
    assert (captures.traces, captures.computed) == (4, 2)


class Mean(nn.Module):
    """forward(x) -> scalar."""

    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).mean()


class Clipped(nn.Module):
    """Reads at most 8 rows: affine in the batch up to there, and constant beyond."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.choose(self.linear(x))
        return hidden.pow(2).mean()


def rows(hidden: Tensor) -> Tensor:
    return hidden[: min(8, len(hidden))]


def branch(hidden: Tensor) -> Tensor:
    return hidden.relu() if len(hidden) > 10 else hidden.tanh()


def even(hidden: Tensor) -> Tensor:
    return hidden * (2.0 if len(hidden) % 2 == 0 else 3.0)


@pytest.mark.parametrize("choose", [rows, branch, even], ids=lambda choose: choose.__name__)
def test_a_model_that_depends_on_the_size_otherwise_is_traced(choose: Any) -> None:
    model = Clipped(choose)
    captures = Captures()
    for size in (4, 6, 13):
        assert at(captures, model, (torch.empty(size, 4),), {})
    assert (captures.traces, captures.computed) == (3, 0)


def test_other_constants_dtypes_and_modes_are_other_kinds() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return (self.dropout(self.linear(x.float())) * scale).pow(2).mean()

    model = Scaled()
    captures = Captures()
    x = torch.empty(4, 4)
    assert at(captures, model, (x,), {})
    assert at(captures, model, (x,), {"scale": 2.0})
    assert at(captures, model, (x,), {"scale": 3.0})
    assert at(captures, model, (x.double(),), {})
    assert at(captures, model.eval(), (x,), {})
    assert captures.traces == 5
