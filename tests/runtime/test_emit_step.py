"""Ranks of a stage that would start other collectives learn it before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from autopar.layouts.placement import Mesh
from autopar.passes.lowering.checks import CheckFailed
from autopar.runtime import emit_step

ONE, OTHER = {"tp": ["all_reduce of 8 torch.float32 in forward"]}, {"tp": ["all_gather of 8 torch.float32 in forward"]}


def compare(monkeypatch: pytest.MonkeyPatch, everyone: list[Any]) -> None:
    """everyone: (first rank of the group, coordinate there, stage -> its collectives), of every rank."""
    monkeypatch.setattr(emit_step, "gather_from_all", lambda mine: everyone)
    groups = SimpleNamespace(group=0, members=lambda group: (0, 1), coordinate=(0,), mesh=Mesh(("tp",), (2,)))
    emit_step._check_order(cast(Any, SimpleNamespace(stages=(), statistics=None)), cast(Any, groups))


def test_two_ranks_of_a_stage_with_other_collectives_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = [(0, (0,), {"stage 0": ONE}), (0, (1,), {"stage 0": OTHER})]
    with pytest.raises(CheckFailed, match=r"rank \(0,\) is all_reduce of 8 .*, of rank \(1,\) all_gather"):
        compare(monkeypatch, everyone)


def test_ranks_of_several_stages_are_compared_within_theirs_and_only_in_what_they_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = [(0, (0,), {"stage 0": ONE, "statistics": OTHER}), (0, (1,), {"stage 0": ONE})]
    compare(monkeypatch, [*first, (2, (0,), {"stage 1": OTHER}), (2, (1,), {"stage 1": OTHER})])
