"""Two programs of one model predict a third size where its numbers are whole, and only if its forward does the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, fingerprint
from autopar.capture.calls import Call
from autopar.capture.family import CallsAt, Family, _DoesNotFitError, _Line, family
from autopar.capture.trace import forward_calls
from autopar.program import Program


class Powers(nn.Module):
    """forward(x (B, 4)) -> a mean over what `power` makes of a product."""

    def __init__(self, power: int = 1) -> None:
        super().__init__()
        self.linear, self.power = nn.Linear(4, 4), power

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        for _ in range(self.power):
            hidden = hidden * hidden
        return hidden.view(-1).mean()


def traced(model: nn.Module, rows: int) -> Program:
    return capture(model, (torch.empty(rows, 4),), {}, training=True)


def calls_of(model: nn.Module) -> CallsAt:
    return functools.partial(
        forward_calls, model, (torch.empty(8, 4),), {}, loss_fn=None, batch=None, training=True, precision=None
    )


def family_of(one: nn.Module, two: nn.Module) -> Family | None:
    calls: list[tuple[Call, ...]] = [calls_of(one)([(8, 4)]), calls_of(two)([(4, 4)])]
    return family(traced(one, 8), traced(two, 4), calls)


def test_a_size_between_is_predicted_as_it_is_traced() -> None:
    model = Powers()
    found = family_of(model, model)
    assert found is not None
    predicted = found.at([(6, 4)], calls_of(model))
    assert predicted is not None
    assert fingerprint(predicted) == fingerprint(traced(model, 6))


class Normed(nn.Module):
    """forward(x (B, 4), bf16) -> a mean over a layer norm's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.norm(x.bfloat16())
        return rows.view(-1).mean()


def test_a_size_between_keeps_the_dtypes_of_what_was_traced() -> None:
    """On meta tensors the statistics of a norm are in float32, on CPUs in the dtype of its rows."""
    model = Normed()
    found = family_of(model, model)
    assert found is not None
    predicted = found.at([(6, 4)], calls_of(model))
    assert predicted is not None
    assert fingerprint(predicted) == fingerprint(traced(model, 6))


def test_a_forward_that_does_something_else_is_not_predicted() -> None:
    model = Powers()
    found = family_of(model, model)
    assert found is not None
    assert found.at([(6, 4)], calls_of(Powers(power=2))) is None


def test_programs_of_different_lengths_are_no_family() -> None:
    assert family_of(Powers(), Powers(power=2)) is None


def test_programs_of_one_size_are_no_family() -> None:
    model = Powers()
    calls = calls_of(model)([(8, 4)])
    assert family(traced(model, 8), traced(model, 8), (calls, calls)) is None


@pytest.mark.parametrize(("x", "y0", "y1", "expected"), [(6, 2, 4, 3), (6, 7, 7, 7), (6, -2, -4, -3), (12, -1, 3, 7)])
def test_numbers_lie_on_the_line_through_those_of_sizes_4_and_8(x: int, y0: int, y1: int, expected: int) -> None:
    assert _Line(4, 8).at(x, y0, y1) == expected


@pytest.mark.parametrize(("x", "y0", "y1"), [(5, 2, 4), (6, 3, 4), (5, -2, -4), (2, 1, 5)])
def test_a_part_of_a_row_and_fewer_than_none_fit_no_line(x: int, y0: int, y1: int) -> None:
    with pytest.raises(_DoesNotFitError):
        _Line(4, 8).at(x, y0, y1)
