"""Rules that are learned from calls: found, proven by execution, recorded, and never believed from elsewhere."""

from __future__ import annotations

import logging
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what a custom operator imports when it first runs: once here, not in every child
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import PlanMismatchError
from autopar.program import Program
from autopar.rules import call_example, child_process, learning
from autopar.rules.call import Call, TensorSpec, call_of
from autopar.rules.discovery import Discovery
from autopar.rules.engine import rule_for, uncovered, undescribed
from autopar.rules.learning import adopt_rules, is_proven, learn_rules, rule_by_execution
from tests.rules.custom_operators import SCALED_SILU, Block, forget_rules

_forget_rules = pytest.fixture(autouse=True)(forget_rules)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))


@torch.library.custom_op("autopar_learn::clamped", mutates_args=())
def clamped(x: Tensor) -> Tensor:
    return x.clamp(-500, 500)


@torch.library.custom_op("autopar_learn::grown", mutates_args=())
def grown(x: Tensor) -> Tensor:
    return x.exp().cumsum(0)


@torch.library.custom_op("autopar_learn::sleeps", mutates_args=())
def sleeps(x: Tensor) -> Tensor:
    time.sleep(600)
    return x.clone()


@torch.library.custom_op("autopar_learn::dies", mutates_args=())
def dies(x: Tensor) -> Tensor:
    os.abort()


@torch.library.custom_op("autopar_learn::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def call(name: str, *arguments: Any) -> Call:
    """Of an operator of one result that has the shape of its first operand."""
    return Call(getattr(torch.ops.autopar_learn, name).default, arguments, (), (arguments[0],))


FLOATS = TensorSpec((4096, 1024), torch.float32)


@cache
def block(batch: int = 12) -> Program:
    torch.manual_seed(0)
    return capture(Block("scaled"), (torch.randn(batch, 8),), {})


def test_every_call_without_a_rule_gets_one_at_its_own_sizes() -> None:
    program = block()
    assert len(uncovered(program)) == 2
    found = learn_rules(program)
    assert found.keys() == undescribed(program).keys()
    assert found["autopar_door.scaled_silu.default(float32[12, 16], float32[16])"] == "a b, b -> a b"
    assert not uncovered(program)
    assert len(uncovered(block(batch=24))) == 2


def test_what_is_known_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = learn_rules(block())
    monkeypatch.setattr(learning, "rule_by_execution", None)
    assert learn_rules(block()) == found


def test_a_rule_on_disk_is_proven_again_before_it_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, *_) = (c for text, c in undescribed(block()).items() if "backward" not in text)
    assert rule_by_execution(one)[0] == "a b, b -> a b"
    for wrong in ("a b, _ -> a b", "a _, a -> a _", "a b, b -> a b ; linear: x -", "a b, b -> b ; a: max"):
        answer = Discovery(operator="", rule=wrong, trials=1, crashes=0)
        monkeypatch.setattr(learning, "search_rule", lambda *_, answer=answer: answer)
        rule, reason = rule_by_execution(one)
        assert rule in (None, "a b, b -> a b"), wrong  # the split stays where only the partial sums were wrong
        assert rule or "does not hold at other sizes and values" in reason


def test_a_bound_that_values_of_usual_size_never_meet_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rule_by_execution(call("clamped", FLOATS))[0] == "a b -> a b"
    monkeypatch.setattr(call_example, "WIDE", 1.0)
    assert rule_by_execution(call("clamped", FLOATS))[0] == "a b -> a b ; linear: x"


def test_where_large_values_say_nothing_the_small_ones_prove() -> None:
    assert rule_by_execution(call("grown", FLOATS))[0] == "_ a -> _ a"
    assert not is_proven("a b -> a b", call("grown", FLOATS))
    assert is_proven("_ b -> _ b", call("grown", FLOATS))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("sleeps", "crashes, or hangs"), ("dies", "crashes, or hangs"), ("noisy", "gives another result each time")],
)
def test_what_hangs_crashes_or_draws_has_no_rule_and_a_reason(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "TRIAL_SECONDS", 0.5)
    rule, why = rule_by_execution(call(name, FLOATS))
    assert rule is None
    assert reason in why


def test_an_operator_for_which_none_is_found_is_named_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return noisy(x).sum()

    noisy.register_fake(torch.empty_like)
    program = capture(Noisy().eval(), (torch.randn(12, 8),), {})
    with caplog.at_level(logging.WARNING, logger="autopar"):
        found = learn_rules(program)
    assert found == {"autopar_learn.noisy.default(float32[12, 8])": None}
    assert "no rule was discovered for autopar_learn.noisy.default(float32[12, 8])" in caplog.text
    assert "another result each time" in caplog.text


def test_rules_of_a_plan_are_proven_before_they_are_taken() -> None:
    stated = dict(learn_rules(block()))
    learning.take_rules(dict.fromkeys(stated))
    assert len(uncovered(block())) == 2
    assert adopt_rules(block(), stated) == stated
    assert not uncovered(block())


@pytest.mark.parametrize(
    "wrong",
    ["a b, _ -> a b", "a b, b -> a b ; linear: x -", "a b, b -> a b ; a: by local_mean", "no rule", "__import__('os')"],
)
def test_a_plan_that_states_a_wrong_rule_is_refused(wrong: str) -> None:
    (text, *_) = (text for text in undescribed(block()) if "backward" not in text)
    with pytest.raises(PlanMismatchError, match=r"states the rule .* does not hold when it is executed here"):
        adopt_rules(block(), {text: wrong})
    assert len(uncovered(block())) == 2


def test_a_plan_cannot_change_the_rules_of_the_table() -> None:
    program = block()
    product = next(node for node in program.graph.nodes if str(node.target) == "aten.mm.default")
    before = rule_for(product)
    adopt_rules(program, {call_of(product).text: "_ _, _ _ -> _ _"})
    assert rule_for(product) == before
    assert call_of(product).text not in undescribed(program)


def test_where_a_plan_has_rules_for_other_sizes_they_are_looked_for() -> None:
    stated = learn_rules(block())
    found = adopt_rules(block(batch=24), stated)
    assert list(found.values()) == list(stated.values())
    assert not uncovered(block(batch=24))


def test_a_rule_that_a_user_would_write_is_proven() -> None:
    for text, one in undescribed(block()).items():
        assert is_proven(SCALED_SILU, one) == ("backward" not in text)
