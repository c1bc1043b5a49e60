"""What forward leaves on the modules: kept as a buffer, noted, warned about, or refused."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError

X = torch.randn(4, 8)


class Model(nn.Module):
    """`run(self, hidden)` makes the loss."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.cache: Any = None
        self.table: Any = None
        self.shape: Any = None
        self.calls = 0
        self.seen: list[Any] = []
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.linear(x)).pow(2).mean()


def carried(self: Any, hidden: Tensor) -> Tensor:
    hidden = hidden if self.cache is None else hidden + self.cache
    self.cache = hidden.detach()
    return hidden


def written_only(self: Any, hidden: Tensor) -> Tensor:
    self.cache = hidden
    return hidden


def built_once(self: Any, hidden: Tensor) -> Tensor:
    if self.table is None:
        self.table = torch.arange(8.0)
    table: Tensor = self.table
    return hidden * table


def table_by_shape(self: Any, hidden: Tensor) -> Tensor:
    if self.table is None or self.shape != hidden.shape:
        self.table, self.shape = self.mean.cos() + torch.linspace(0, 1, 8), hidden.shape
    table: Tensor = self.table
    return hidden * table


def kept_for_others(self: Any, hidden: Tensor) -> Tensor:
    self.cache = {**(self.cache or {}), "hidden": hidden}
    return hidden


def first_mean(self: Any, hidden: Tensor) -> Tensor:
    if self.cache is None:
        self.cache = hidden.detach().mean()
    return hidden - self.cache  # type: ignore[no-any-return]


def first_weight(self: Any, hidden: Tensor) -> Tensor:
    if self.cache is None:
        self.cache = torch.zeros(8)
        self.cache[0] = self.linear.weight.detach().sum()
    return hidden * self.cache  # type: ignore[no-any-return]


def first_draw(self: Any, hidden: Tensor) -> Tensor:
    if self.cache is None:
        self.cache = torch.randn(8)
    return hidden * self.cache  # type: ignore[no-any-return]


def clock(self: Any, hidden: Tensor) -> Tensor:
    self.cache = torch.zeros(()) if self.cache is None else self.cache + 1
    return hidden + self.cache


def written_to_a_buffer(self: Any, hidden: Tensor) -> Tensor:
    if self.cache is not None:
        self.mean.copy_(self.cache.mean(0))
    self.cache = hidden.detach()
    return hidden


def counted(self: Any, hidden: Tensor) -> Tensor:
    self.calls += 1
    return hidden * self.calls


def collected(self: Any, hidden: Tensor) -> Tensor:
    self.seen.append(hidden)
    return sum(self.seen)  # type: ignore[return-value]


def skipped(self: Any, hidden: Tensor) -> Tensor:
    return hidden if random.random() < 0.5 else hidden * 2


def grown_buffer(self: Any, hidden: Tensor) -> Tensor:
    self.mean = hidden.detach()
    return hidden


REFUSED = [carried, collected, first_mean, first_weight, first_draw, clock, written_to_a_buffer]


@pytest.mark.parametrize("run", REFUSED)
def test_a_tensor_that_the_next_call_needs_is_refused(run: Callable[[Any, Tensor], Tensor]) -> None:
    name = "seen" if run is collected else "cache"
    with pytest.raises(CaptureError, match=rf"reads the tensor {name} that an earlier call stored.*register_buffer"):
        capture(Model(run), (X,))


@pytest.mark.parametrize("run", [built_once, table_by_shape, kept_for_others])
def test_a_constant_of_an_earlier_call_and_what_changes_no_output_are_captured(
    run: Callable[[Any, Tensor], Tensor],
) -> None:
    model = Model(run)
    program = capture(model, (X,))
    (loss,) = [output for output in program.outputs if output.role == "loss"]
    assert loss.name
    assert (model.cache, model.table, model.shape) == (None, None, None)


def test_what_is_stored_by_a_module_with_two_names_is_captured() -> None:
    """The trace leaves its own tensors as the parameters of such a module."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleList([Model(written_only)])])
            self.same = nn.ModuleList(list(self.layers[0]))  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.same[0](x)
            return loss

    assert capture(Twice(), (X,)).outputs


@pytest.mark.parametrize("run", [written_only, built_once, counted, skipped])
def test_the_module_is_as_before(run: Callable[[Any, Tensor], Tensor]) -> None:
    model = Model(run)
    random.seed(3)
    before = random.getstate()
    capture(model, (X,))
    assert (model.cache, model.table, model.calls, model.seen) == (None, None, 0, [])
    assert random.getstate() == before


def test_a_tensor_nobody_reads_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="autopar"):
        capture(Model(written_only), (X,))
    assert "forward stores a tensor in the attribute cache" in caplog.text


@pytest.mark.parametrize(
    ("run", "words"),
    [(counted, r"changes the attribute calls \(to 1\)"), (skipped, "draws random numbers in Python")],
)
def test_what_is_frozen_is_warned_about(
    caplog: pytest.LogCaptureFixture, run: Callable[[Any, Tensor], Tensor], words: str
) -> None:
    capture(Model(run), (X,))
    assert any(record.levelname == "WARNING" for record in caplog.records)
    assert words.replace("\\", "") in caplog.text


def test_a_plain_model_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    capture(Model(lambda self, hidden: hidden), (X,))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_buffer_must_keep_its_shape() -> None:
    with pytest.raises(CaptureError, match=r"assigns shape \(4, 8\) to the buffer mean of shape \(8,\)"):
        capture(Model(grown_buffer), (X,))
