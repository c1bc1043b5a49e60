"""A module keeps a bounded number of graphs: the first, and those that were used last."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConfigurationError
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.step.kept_steps import KEPT_OPERATORS, LEAST_BOUND, KeptSteps, most_graphs


def kept(bound: int, keys: str) -> KeptSteps:
    steps = KeptSteps(bound)
    for key in keys:
        if steps.find((key,)) is None:
            steps.keep((key,), cast(Step, key))
    return steps


def test_the_least_recently_used_goes_and_the_first_stays() -> None:
    steps = kept(3, "abcbd")
    assert [key for key in "abcd" if steps.find((key,))] == ["a", "b", "d"]
    assert len(kept(3, "abcdefgh" * 3)) == 3


def test_a_graph_that_comes_back_is_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        kept(2, "abc")
        assert "graph 2 of at most 2" in caplog.text
        assert "dropped the graph that was used least recently" in caplog.text
        assert not [record for record in caplog.records if record.levelno == logging.WARNING]
        kept(2, "abcb")
    assert "more than 2 different forms" in caplog.text


@pytest.mark.parametrize("given", ["1", "-3", "many", "1.5"])
def test_a_bound_that_cannot_be_meant_is_named(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("AUTOPAR_GRAPHS", given)
    with pytest.raises(ConfigurationError, match=f"AUTOPAR_GRAPHS='{given}'"):
        most_graphs(program_of(3))


def program_of(operators: int) -> Any:
    return SimpleNamespace(graph=SimpleNamespace(nodes=range(operators)))


def test_small_models_keep_more_graphs_than_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_GRAPHS", raising=False)
    assert most_graphs(program_of(KEPT_OPERATORS // 40)) == 40
    assert most_graphs(program_of(KEPT_OPERATORS)) == LEAST_BOUND


class Sum(nn.Module):
    """forward(x (B, 4)) -> scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def test_a_module_whose_inputs_have_many_sizes_keeps_few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_GRAPHS", "3")
    module: Any = autopar.compile(Sum(), torch.ones(2, 4), mode="fast")
    for rows in (2, 3, 4, 5, 6, 3, 2):
        assert float(module(torch.ones(rows, 4)).detach()) == 4.0 * rows
    assert len(module._steps) == 3
