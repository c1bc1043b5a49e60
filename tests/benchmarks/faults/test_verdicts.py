"""Ends of processes that are told apart: silently wrong, hanging, foreign, unnamed, lost, and what a culprit may do."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.faults.fault import Fault, Scene
from benchmarks.faults.verdicts import BY_WEIGHT, GOOD, RankEnd, judge, worse


def _nothing(scene: Scene) -> None:
    """No process is started here."""


def _fault(**expected: Any) -> Fault:
    return Fault(name="made/up", point=3, does="rank 1 does it", run=_nothing, layout="dp2", **expected)


def _ended(ending: Any, rank: int = 0, message: str = "") -> RankEnd:
    return RankEnd(rank=rank, ending=ending, message=message)


RETURNED = _ended("returned")
NAMES_RANK_1 = _ended("raised ours", 1, "RankMismatchError: rank 1 passed (3, 8), the others (4, 8)")


@pytest.mark.parametrize(
    ("ends", "word"),
    [
        ([NAMES_RANK_1, _ended("raised ours", 0, "rank 1 differs")], "refused"),
        ([NAMES_RANK_1, _ended("raised ours", 0, "it differs")], "refused"),
        ([_ended("raised ours", 1, "it differs")], "refused without naming"),
        ([NAMES_RANK_1, RETURNED], "silently wrong"),
        ([NAMES_RANK_1, _ended("raised wrong", 0, "Wrong: the loss is 8 % off")], "silently wrong"),
        ([NAMES_RANK_1, _ended("raised other", 0, "KeyError: 'x'")], "foreign traceback"),
        ([NAMES_RANK_1, _ended("raised torch's", 0, "RuntimeError: rank 1: connection closed")], "foreign traceback"),
        ([NAMES_RANK_1, _ended("died")], "crashed"),
        ([NAMES_RANK_1, _ended("ran on")], "hangs"),
    ],
)
def test_the_worst_process_of_a_fault_that_must_be_refused_counts(ends: list[RankEnd], word: str) -> None:
    found = judge(_fault(words=("rank 1",)), ends)
    assert (found.word, found.good) == (word, word in GOOD)


def test_what_must_be_right_may_not_be_refused() -> None:
    assert judge(_fault(right=True), [RETURNED]).word == "right"
    assert judge(_fault(right=True), [NAMES_RANK_1]).word == "refused what is sound"
    assert judge(_fault(right=True, words=("rank 1",)), [NAMES_RANK_1]).word == "refused"


def test_a_changed_file_is_lost_whatever_was_said() -> None:
    found = judge(_fault(words=("rank 1",)), [NAMES_RANK_1], ["step"])
    assert (found.word, found.happened) == ("lost", "step is gone or changed")


def test_torch_may_say_it_where_it_says_the_same() -> None:
    modified = _ended("raised torch's", 0, "RuntimeError: a variable has been modified by an inplace operation")
    other = _ended("raised torch's", 0, "RuntimeError: expected scalar type Float")
    fault = _fault(words=("modified",), as_torch=True)
    assert [judge(fault, [each]).word for each in (modified, other)] == ["refused", "foreign traceback"]


@pytest.mark.parametrize("ending", ["died", "ran on", "raised other", "returned"])
def test_what_becomes_of_a_culprit_is_not_judged_but_for_a_fault_that_was_not_made(ending: Any) -> None:
    fault = _fault(words=("rank 1",), culprits=frozenset({1}))
    told = _ended("raised ours", 0, "RankLostError: rank 1 ended")
    assert judge(fault, [told, _ended(ending, 1)]).word == "refused"
    assert judge(fault, [told, _ended("raised wrong", 1, "Wrong: the save was not cut")]).word == "silently wrong"


def test_named_is_told_only_where_something_was_refused() -> None:
    fault = _fault(right=True, words=("rank 1",))
    assert judge(fault, [RETURNED]).named is None
    assert judge(fault, [NAMES_RANK_1]).named is True
    assert judge(fault, [_ended("raised ours", 0, "no")]).named is False


def test_of_two_acts_the_worse_counts() -> None:
    fault = _fault(right=True)
    right, wrong = judge(fault, [RETURNED]), judge(fault, [_ended("raised wrong")])
    assert worse(right, wrong) is worse(wrong, right) is wrong
    assert len(set(BY_WEIGHT)) == len(BY_WEIGHT)
