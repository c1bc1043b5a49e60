"""Operator alternatives as choices of the planner: chosen by price, named, pinned, edited, refused, written."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import ConfigurationError, PlanMismatchError
from autopar.passes.lowering.chain import lowered_step
from autopar.plans.plan_value import DEFAULT_IMPLEMENTATION
from autopar.program import Program

ROWWISE = torch.ops.autopar.mm_fp8_rowwise.default


class Layers(nn.Module):
    """A wide layer, for which float8 pays, and a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4096, 8192, bias=False)
        self.narrow = nn.Linear(8192, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x)).float().square().mean()


ASKED: dict[str, Any] = {"dims": {"dp_shard": 8}, "mode": "fast"}


def planner(cluster: str = "8 H100-SXM", **options: Any) -> autopar.Planner:
    with torch.device("meta"):
        model, x = Layers(), torch.empty(8192, 4096)
    return autopar.Planner(model, (x,), cluster=cluster, **options)


@pytest.fixture(scope="module")
def asked() -> autopar.Planner:
    return planner(precision="fp8")


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        return capture(Layers(), (torch.empty(8192, 4096),), precision="bf16")


@pytest.fixture(scope="module")
def plan(asked: autopar.Planner) -> autopar.Plan:
    return asked.plan(**ASKED)


def implementations(plan: autopar.Plan) -> dict[str, str]:
    return {name: operator.implementation for name, operator in plan.operators.items() if "/mm#" in name}


def test_price_decides_which_products_run_in_float8(plan: autopar.Plan) -> None:
    chosen = implementations(plan)
    assert chosen["wide/mm#0"] == "fp8_rowwise"
    assert chosen["narrow/mm#0"] == DEFAULT_IMPLEMENTATION
    assert implementations(planner(precision="bf16").plan(**ASKED)).keys() == chosen.keys()
    assert not planner(precision="bf16").plan(**ASKED).implementations


def test_blocks_that_would_be_padded_stay_as_they_are() -> None:
    """8200 columns over 8 ranks are 1025 each: a copy of the padded result would cost what float8 saves."""

    class Odd(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(4096, 8200, bias=False)
            self.narrow = nn.Linear(8200, 32, bias=False)

    with torch.device("meta"):
        model, x = Odd(), torch.empty(8192, 4096)
    split = autopar.Planner(model, (x,), cluster="8 H100-SXM", precision="fp8").plan(dims={"tp": 8}, mode="fast")
    assert split.operators["wide/mm#0"].axes == ("n",)
    assert split.operators["wide/mm#0"].implementation == DEFAULT_IMPLEMENTATION


def test_a_plan_with_more_choices_is_never_dearer(plan: autopar.Plan) -> None:
    without = planner(precision="bf16").plan(**ASKED)
    assert plan.objective_seconds < without.objective_seconds
    assert plan.predicted.step_seconds < without.predicted.step_seconds


def test_the_runner_up_is_another_implementation(plan: autopar.Plan) -> None:
    text = str(plan.explain("wide/mm#0"))
    assert "runs as fp8_rowwise" in text
    others = [line for line in text.splitlines() if "instead" in line]
    assert any("fp8_tensorwise" in line or "runs as" not in line for line in others), text


def test_the_lowered_program_calls_what_the_plan_names(program: Program, plan: autopar.Plan) -> None:
    lowered = lowered_step(program, plan, 0).only.program
    calls = {str(n.meta["operator"]) for n in lowered.graph.nodes if n.target is ROWWISE}
    assert calls == {name for name, way in implementations(plan).items() if way == "fp8_rowwise"}


def test_a_plan_file_keeps_it_and_a_wrong_name_is_refused(plan: autopar.Plan) -> None:
    document = json.loads(plan.to_json())
    assert autopar.Plan.from_json(json.dumps(document).encode()).operators == plan.operators
    document["operators"]["wide/mm#0"]["implementation"] = "fp8_rows"
    with pytest.raises(ConfigurationError, match=r'implementation is .fp8_rows.*; did you mean "fp8_rowwise"'):
        autopar.Plan.from_json(json.dumps(document).encode())


def test_an_implementation_that_an_operator_does_not_have_is_refused_by_name(
    program: Program, plan: autopar.Plan
) -> None:
    name = next(name for name in plan.operators if "/mm#" not in name)
    spoiled = plan.with_(
        operators={**plan.operators, name: replace(plan.operators[name], implementation="fp8_rowwise")}
    )
    with pytest.raises(PlanMismatchError, match="does not run as 'fp8_rowwise'; it runs as default"):
        lowered_step(program, spoiled, 0)


def test_edits_and_constraints_pin_it(plan: autopar.Plan) -> None:
    edited = plan.edit({"narrow": {"implementation": "fp8_tensorwise"}})
    assert {way for name, way in implementations(edited).items() if name.startswith("narrow/")} == {"fp8_tensorwise"}
    assert implementations(edited)["wide/mm#0"] == "fp8_rowwise"
    assert edited.operators["narrow/mm#0"].axes == plan.operators["narrow/mm#0"].axes
    assert edited.objective_seconds > plan.objective_seconds
    pinned = planner(precision="fp8").plan(**ASKED, constraints={"wide": {"implementation": "default"}})
    assert implementations(pinned)["wide/mm#0"] == DEFAULT_IMPLEMENTATION
    unasked = planner(precision="bf16").plan(**ASKED, constraints={"wide": {"implementation": "fp8_rowwise"}})
    assert implementations(unasked)["wide/mm#0"] == "fp8_rowwise"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"precision": "fp8", "cluster": "8 A100-80"}, "no float8 units"),
        ({"precision": "fp8", "constraints": {"wide": {"implementation": "fp9"}}}, "write one of default, fp8_rowwise"),
        ({"precision": "fp32", "constraints": {"wide": {"implementation": "fp8_rowwise"}}},
         "does not stand for aten.mm.default.float32.*bf16"),
        ({"precision": "float8"}, 'did you mean "fp8"'),
    ],
)
def test_what_cannot_be_is_refused_before_the_search(options: dict[str, Any], says: str) -> None:
    asked = {**options}
    constraints = asked.pop("constraints", None)
    with pytest.raises(ConfigurationError, match=says):
        planner(**asked).plan(**ASKED, constraints=constraints)
