"""One hint, where making graphs takes most of the time, names a few lengths that padding would leave."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.runtime.step.length_hint import HINT_LIMITS, LengthHint, multiple_for


def program_of(length: int, batch: int = 8) -> Any:
    return SimpleNamespace(inputs=[SimpleNamespace(role="input", name="tokens", shape=(batch, length))])


def warned(caplog: pytest.LogCaptureFixture, lengths: range, share: float) -> list[str]:
    """Graphs that take a second each, `share` of the time."""
    now = [0.0]
    hint = LengthHint(clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for length in lengths:
            now[0] += 1.0
            hint.made(program_of(length), 1.0)
            now[0] += 1.0 / share - 1.0
    return [record.getMessage() for record in caplog.records]


def test_it_says_once_what_lengths_cost_and_what_padding_leaves(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warned(caplog, range(33, 63), share=0.9)
    assert text.startswith("10 values of dim 1 of tokens (33 to 42), each a graph of its own, cost 10.0 of the last 11")
    assert "Padded to 40, 48 they would have cost about 2.0 s, with 11% more elements" in text
    assert "torch.nn.functional.pad(x, (0, -x.shape[1] % 8))" in text


def test_few_lengths_and_loops_that_mostly_run_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert not warned(caplog, range(33, 33 + HINT_LIMITS.new_lengths - 1), share=0.9)
    assert not warned(caplog, range(33, 93), share=0.3)


def test_padding_adds_no_more_than_the_limit() -> None:
    assert multiple_for([500, 510, 1000, 1020], HINT_LIMITS) == 512
    assert multiple_for([17, 18, 19, 20], HINT_LIMITS) == 4
    assert multiple_for([5], HINT_LIMITS) is None
