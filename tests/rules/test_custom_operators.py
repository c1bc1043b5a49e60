"""Custom operators and Triton kernels go through `register_rule`: they are split, and the plan computes as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import ConfigurationError, UnsupportedOperatorError
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.rules import engine, learning
from autopar.rules.engine import described_rule, uncovered
from tests.capture.execute import eager_step, worst_gradient_error
from tests.passes.hand_plans import run_plan, tensors_of
from tests.rules.custom_operators import OPERATORS, SCALED_SILU, SCALED_SILU_BACKWARD, Block, forget_rules

RULES = {
    "autopar_door::scaled_silu": SCALED_SILU,
    "autopar_door::scaled_silu_backward": SCALED_SILU_BACKWARD,
    "autopar_door::plain_silu": SCALED_SILU,
}


_forget_rules = pytest.fixture(autouse=True)(forget_rules)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def register_all() -> None:
    for name, text in RULES.items():
        autopar.register_rule(name, text)


def planned(model: nn.Module, x: Tensor, devices: int) -> Plan:
    return autopar.plan(
        model, (x,), cluster=f"{devices} H100-SXM", mesh=(devices,), constraints="no_replicated_compute", strict=True,
        with_baselines=False,
    )


def calls_of(program: Program, name: str) -> list[str]:
    return [str(node.meta["operator"]) for node in program.graph.nodes if str(node.target) == name]


def check_parity(program: Program, plan: Plan, model: nn.Module, x: Tensor) -> None:
    """Loss and gradients of the plan on simulated ranks equal those of the model."""
    names = [value.name for value in program.inputs if value.role == "input"]
    results = run_plan(program, plan, tensors_of(program, model, dict.fromkeys(names, x)))
    loss, gradients, _ = eager_step(model, (x,), {})
    (found,) = results.outputs.values()
    assert abs(float(found) - float(loss)) < 1e-6 * abs(float(loss))
    assert worst_gradient_error(results.gradients, gradients) < 1e-5


@pytest.mark.exhaustive(sample="backward_in_torch-4")
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(
    ("operator", "split"),
    [
        ("scaled", ["autopar_door.scaled_silu.default", "autopar_door.scaled_silu_backward.default"]),
        ("plain", ["autopar_door.plain_silu.default"]),
    ],
    ids=["backward_operator", "backward_in_torch"],
)
def test_an_operator_with_a_registered_rule_is_split(operator: str, split: list[str], devices: int) -> None:
    register_all()
    torch.manual_seed(0)
    model, x = Block(operator), torch.randn(12, 8)
    program = capture(model, (x,), {})
    assert not uncovered(program)
    plan = planned(model, x, devices)
    assert not plan.uncovered
    for name in split:
        (call,) = calls_of(program, name)
        assert plan.operators[call].axes != (None,), f"{name} runs whole on every device"
    check_parity(program, plan, model, x)


def test_parity_sees_a_rule_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    register_all()
    engine.add_rule("autopar_door.scaled_silu_backward.default", f"{SCALED_SILU_BACKWARD} ; m: -")
    torch.manual_seed(0)
    model, x = Block("scaled"), torch.randn(12, 8)
    program = capture(model, (x,), {})
    plan = autopar.plan(model, (x,), cluster="2 H100-SXM", dims={"dp_replicate": 2}, with_baselines=False)
    with pytest.raises(AssertionError):
        check_parity(program, plan, model, x)


def test_a_wrong_string_is_refused_and_leaves_no_rule() -> None:
    with pytest.raises(ConfigurationError, match=r"'m' split in 2"):
        autopar.register_rule("autopar_door::scaled_silu_backward", f"{SCALED_SILU_BACKWARD} ; m: max")
    assert described_rule(torch.ops.autopar_door.scaled_silu_backward.default) is None


def test_the_second_rule_replaces_the_first() -> None:
    autopar.register_rule("autopar_door::scaled_silu", "[m] n, n -> [m] n")
    autopar.register_rule("autopar_door::scaled_silu", SCALED_SILU)
    assert described_rule(torch.ops.autopar_door.scaled_silu.default) == SCALED_SILU
    with pytest.raises(ConfigurationError):
        autopar.register_rule("autopar_door::scaled_silu", "m n, n -> n m")
    assert described_rule(torch.ops.autopar_door.scaled_silu.default) == SCALED_SILU


def test_a_rule_for_an_operator_of_torch_replaces_that_of_the_table() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    autopar.register_rule("aten::mm", "m [k], [k] n -> m n ; flops: 2*m*k*n")
    program = capture(model, (torch.randn(12, 8),), {})
    rules = [engine.rule_for(node) for node in program.graph.nodes if str(node.target) == "aten.mm.default"]
    assert rules
    assert all(rule is not None and not rule.reductions for rule in rules)
    with pytest.raises(ConfigurationError, match="differs"):
        autopar.register_rule("aten::mm", "m k, k n -> m n ; k: max")


def test_a_rule_that_comes_after_a_plan_was_cached_makes_a_new_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Block("scaled"), torch.randn(12, 8)

    def plan(strict: bool = False) -> Plan:
        return autopar.plan(model, (x,), cluster="2 H100-SXM", mesh=(2,), cache_dir=tmp_path, strict=strict,
            with_baselines=False)

    assert len(plan().uncovered) == 2
    with pytest.raises(UnsupportedOperatorError, match="scaled_silu"):
        plan(strict=True)
    register_all()
    assert not plan(strict=True).uncovered
    assert len(list(tmp_path.iterdir())) == 2


def test_the_error_of_strict_plans_names_the_way_to_a_rule() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"autopar rules discover .*autopar\.register_rule"):
        planned(Block("scaled"), torch.randn(12, 8), 2)


class Layers(nn.Module):
    """forward(x (B, 8)) -> loss of two numbered blocks, each around the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.scale = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        for up, scale in zip(self.ups, self.scale, strict=True):
            x = OPERATORS["scaled"](up(x), scale)
        return x.pow(2).mean()


def discovering(model: nn.Module, x: Tensor, **options: Any) -> Plan:
    return autopar.plan(model, (x,), cluster="2 H100-SXM", mesh=(2,), constraints="no_replicated_compute", **options,
        with_baselines=False)


def test_a_plan_that_discovers_splits_the_operators_and_computes_as_before(own_cache: Path) -> None:
    torch.manual_seed(0)
    model, x = Block("scaled"), torch.randn(12, 8)
    plan = discovering(model, x, discover=True, strict=True)
    assert not plan.uncovered
    assert list(plan.discovered.values()) == ["a b, b -> a b", "a b, a b, b -> a b, b ; linear: x - -"]
    assert "rule discovered for autopar_door.scaled_silu.default(float32[12, 16], float32[16])" in plan.summary()
    program = capture(model, (x,), {})
    for name in ("autopar_door.scaled_silu.default", "autopar_door.scaled_silu_backward.default"):
        (call,) = calls_of(program, name)
        assert plan.operators[call].axes != (None,)
    check_parity(program, plan, model, x)
    assert len(list((own_cache / "rules").iterdir())) == 2


def test_parity_sees_a_discovered_rule_that_is_wrong(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "a b, a b, b -> a b, b ; a: -"  # the gradient of the scale is left as each rank has it
    monkeypatch.setattr(learning, "rule_by_execution", lambda call: (wrong if "backward" in call.text else None, ""))
    torch.manual_seed(0)
    model, x = Block("scaled"), torch.randn(12, 8)
    plan = autopar.plan(model, (x,), cluster="2 H100-SXM", dims={"dp_replicate": 2}, discover=True,
        with_baselines=False)
    with pytest.raises(AssertionError):
        check_parity(capture(model, (x,), {}), plan, model, x)


def test_micro_batches_and_pipelines_learn_the_calls_of_their_parts(own_cache: Path) -> None:
    model, x = Layers(), torch.randn(12, 8)
    asked: tuple[dict[str, Any], ...] = ({"mesh": (2,)}, {"dims": {"pp": 2}})
    for options in asked:
        plan = autopar.plan(
            model, (x,), cluster="2 H100-SXM", discover=True, strict=True, micro_batches=2, mode="fast", **options
        )
        assert {"float32[6, 8]" in call for call in plan.discovered} == {True, False}
        assert not plan.uncovered


def test_what_was_discovered_is_asked_for_and_kept_with_the_plan(own_cache: Path, tmp_path: Path) -> None:
    model, x = Block("scaled"), torch.randn(12, 8)
    free = autopar.plan(model, (x,), cluster="2 H100-SXM", mesh=(2,), cache_dir=tmp_path / "plans",
        with_baselines=False)
    assert (len(free.uncovered), free.discovered) == (2, {})
    found = free.what_if(discover=True)
    assert len(found.discovered) == 2
    assert not found.uncovered
    assert found.edit({"up.weight": "R"}).discovered == found.discovered
    assert Plan.from_json(found.to_json()) == found
    known = autopar.plan(model, (x,), cluster="2 H100-SXM", mesh=(2,), cache_dir=tmp_path / "plans", discover=True,
        with_baselines=False)
    assert known.discovered == found.discovered
    assert len(list((tmp_path / "plans").iterdir())) == 2


def test_a_planner_forgets_what_it_worked_out_without_the_rules(own_cache: Path) -> None:
    planner = autopar.Planner(Block("scaled"), (torch.randn(12, 8),), cluster="2 H100-SXM")
    assert len(planner.plan(mesh=(2,), mode="fast").uncovered) == 2
    assert not planner.plan(mesh=(2,), mode="fast", discover=True).uncovered


def test_a_plan_from_a_file_brings_its_rules(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block("scaled"), torch.randn(12, 8)
    plan = Plan.from_json(discovering(model, x, discover=True).to_json())
    monkeypatch.setattr(engine, "_DISCOVERED", {})
    engine.rule_of.cache_clear()
    assert len(uncovered(capture(model, (x,), {}))) == 2
    bound = autopar.Planner(model, (x,), cluster="2 H100-SXM").bind(plan)
    assert "a b, b -> a b" in str(engine._DISCOVERED)
    assert bound.what_if(mode="fast").uncovered == {}


def test_a_plan_without_it_says_how_to_look_for_rules(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="autopar"):
        autopar.plan(Block("scaled"), (torch.randn(12, 8),), cluster="2 H100-SXM", mesh=(2,), with_baselines=False)
    assert "discover=True (--discover) looks for rules" in caplog.text
    with pytest.raises(UnsupportedOperatorError, match=r"discover=True \(--discover\)"):
        planned(Block("scaled"), torch.randn(12, 8), 2)
