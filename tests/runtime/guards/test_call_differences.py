"""The sentence about ranks that differ; `tests/distributed/test_calls.py` makes the faults."""

from __future__ import annotations

from typing import Any

from autopar.runtime.guards.call_differences import ToldOfCall, differences


def told(act: str = "train call 7 of Net", **changed: Any) -> ToldOfCall:
    usual = {"updates": 6, "shard": (0, 1), "form": {("passed", "x"): "(4, 8)"}, "whole": {"x": 5}, "part": {}}
    return ToldOfCall(act=act, **{**usual, **changed})


def test_shapes_are_named_by_rank_in_the_words_of_the_issue() -> None:
    other = told(form={("passed", "x"): "(3, 8)"})
    assert "rank 1 passed (3, 8) as x, the others (4, 8): " in differences([told(), other, told()])
    assert "ranks 1, 2 passed (3, 8) as x, the others (4, 8): " in differences([told(), other, other, told(), told()])
    assert "rank 1 passed nothing as x, rank 0 (4, 8)" in differences([told(), told(form={})])


def test_what_ranks_do_goes_before_what_they_passed() -> None:
    eval_call = told("eval call 7 of Net", updates=5, whole={})
    third = told("train call 8 of Net")
    text = differences([told(), eval_call, told(), third])
    assert text.startswith("rank 1 started eval call 7 of Net, rank 3 started train call 8 of Net, the others train")


def test_counts_of_updates_leave_out_ranks_that_train_nothing() -> None:
    text = differences([told(), told(updates=-1), told(updates=5), told()])
    assert "rank 2 had updated weights 5 times, the others 6" in text


def test_inputs_with_other_values_are_named() -> None:
    usual = {"x": 5, "mask": 6, "labels": 7}
    text = differences([told(whole=usual), told(whole={**usual, "labels": 8}), told(whole=usual)])
    assert "rank 1 passed other values of labels than the others" in text
    assert 'batch="local"' in text
    many = {f"x{index}": 0 for index in range(9)}
    assert "of x0, x1, x2, x3, ... than rank 0" in differences([told(whole=many), told(whole=dict.fromkeys(many, 1))])


def test_only_ranks_of_one_part_of_the_batch_are_compared() -> None:
    ranks = [told(shard=(index // 2, 2), part={"x": digest}) for index, digest in enumerate([1, 1, 2, 3])]
    text = differences(ranks)
    assert "ranks 2, 3 passed different values of x, though each of them has part 1 of the 2 parts" in text
