"""Bad input on one process: each mistake is an error of autopar's own that says what, where and what to do."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import (
    CaptureError,
    ConfigurationError,
    InfeasibleError,
    PlanMismatchError,
    UnsupportedOperatorError,
)
from autopar.layouts.placement import Mesh, Shard
from autopar.plans.parallel_plan import Plan
from tests.distributed.models import TiedModel, tied_model, tokens
from tests.distributed.uncovered import UncoveredModel
from tests.planner.problems import Mlp

H100 = "4 H100-SXM"


class Branch(nn.Module):
    """Its forward decides by values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        if hidden.sum() > 0:
            return hidden.mean()
        return hidden.pow(2).mean()


@pytest.fixture(scope="module")
def alone() -> Plan:
    """A plan of the tied model for one process."""
    return autopar.compile(tied_model(), tokens(0)).plan


def plan_tied(**options: Any) -> Plan:
    return autopar.plan(tied_model(), tokens(0), cluster=H100, **options)


@pytest.mark.parametrize("entry", [autopar.compile, autopar.plan])
def test_a_function_is_no_module(entry: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=r"expected a torch\.nn\.Module, got function; wrap"):
        entry(lambda x: x, (torch.ones(2),))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"token": torch.zeros(2, 3, dtype=torch.long)}, r"do not fit TiedModel\.forward"),
        ((), r"do not fit TiedModel\.forward"),
        ((torch.zeros(2, 3),), r"TiedModel cannot be traced at .*models\.py:\d+"),
        ("tokens", "example inputs of type str: pass"),
    ],
    ids=["unknown name", "missing", "wrong dtype", "no tensor"],
)
def test_inputs_that_do_not_fit_forward_are_named(inputs: Any, words: str) -> None:
    with pytest.raises(autopar.AutoparError, match=words):
        autopar.compile(tied_model(), inputs)


def test_a_branch_on_values_names_file_and_line() -> None:
    with pytest.raises(CaptureError, match=r"test_bad_input\.py:\d+ \(if hidden\.sum\(\) > 0:\).*torch\.where"):
        autopar.compile(Branch(), (torch.randn(2, 4),))


def test_a_plan_for_another_world_size_says_how_many_to_start() -> None:
    with pytest.raises(PlanMismatchError, match=r"for 4 devices.*1 processes are running: start 4"):
        autopar.compile(tied_model(), tokens(0), plan=plan_tied(dims={"tp": 4}))


def test_a_plan_of_another_model_is_refused(alone: Plan) -> None:
    torch.manual_seed(0)
    with pytest.raises(PlanMismatchError, match=r"another graph .*fingerprint"):
        autopar.compile(TiedModel(width=16), tokens(0), plan=alone)


def test_a_plan_for_another_batch_is_refused(alone: Plan) -> None:
    with pytest.raises(PlanMismatchError, match="input shapes"):
        autopar.compile(tied_model(), tokens(0, batch=4), plan=alone)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "damaged"),
        (b"[1]", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"{}", "schema version None"),
        (b'{"schema_version": 1}', "damaged"),
        (b'{"schema_version": 99}', "schema version 99, this autopar reads 1 to"),
    ],
)
def test_a_damaged_plan_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"{re.escape(str(path))}.*{words}"):
        autopar.compile(tied_model(), tokens(0), plan=path)


def test_a_missing_plan_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the plan .*nowhere\.json: No such file"):
        autopar.compile(tied_model(), tokens(0), plan=tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: d["mesh"].update(shape=[0]), "mesh"),
        (lambda d: d["mesh"].update(shape=[2, 2]), "mesh"),
        (lambda d: d["parameters"]["embedding.weight"].update(stored=["S(x)"]), r"'S\(x\)' is no placement"),
        (
            lambda d: d["parameters"]["embedding.weight"].update(stored="R"),
            r"stored must be a JSON list",
        ),
        (lambda d: d["parameters"]["embedding.weight"].update(stord=["R"]), r"embedding\.weight .*stord"),
        (lambda d: d.update(gap="none"), "gap must be float"),
        (lambda d: d.pop("operators"), "operators"),
    ],
)
def test_a_damaged_entry_of_a_plan_is_named(
    tmp_path: Path, alone: Plan, damage: Callable[[dict[str, Any]], Any], words: str
) -> None:
    document = json.loads(alone.to_json())
    damage(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigurationError, match=words):
        Plan.load(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dims": {"tp": 3}}, "do not divide 4"),
        ({"dims": {"tp": 8}}, "do not divide 4"),
        ({"dims": {"dp": 4}}, "unknown axis 'dp'.*dp_shard"),
        ({"schedule": "1f1b"}, "schedule='1f1b' needs stages"),
        ({"schedule": "2f2b", "dims": {"pp": 2}}, "schedule='2f2b': write one of gpipe, 1f1b"),
        ({"dims": {"pp": 0}}, "axis pp has size 0"),
        ({"dims": {"pp": 3}}, "pp=3 cuts 4 devices"),
        ({"dims": {"tp": 0}}, "size 0"),
        ({"mesh": (3,)}, "the cluster 4"),
        ({"mesh": (4,), "dims": {"tp": 4}}, "not both"),
        ({"constraints": {"nothing.*": {"tp": "R"}}, "dims": {"tp": 4}}, "nothing"),
        ({"constraints": {"embedding.weight": {"tp": "S(7)"}}, "dims": {"tp": 4}}, r"embedding\.weight cannot be"),
        ({"constraints": {"embedding.weight": {"tp": "R"}}, "mesh": (4,)}, "names axis 'tp'; the mesh has inner"),
        ({"constraints": {"embedding.weight": {"recompute": "all"}}}, "recompute='all'; write one of none, selective"),
        ({"constraints": {"nothing": {"recompute": "full"}}}, "'nothing' .*matches no module or forward operator"),
        ({"recompute": "sometimes"}, "recompute='sometimes'; write one of"),
        ({"time_limit": -1.0}, "time_limit=-1.0: write seconds"),
        ({"time_limit": "soon"}, "time_limit='soon': write seconds"),
        ({"warm_start": "nowhere.json"}, r"cannot read the plan nowhere\.json"),
        ({"mode": "exact"}, "mode='exact': write one of fast, default, max"),
        ({"memory_limit": "lots"}, "memory_limit='lots'"),
        ({"optimizer": 3}, "optimizer=3"),
    ],
)
def test_impossible_requests_say_why(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        plan_tied(**options)


def test_a_limit_that_nothing_fits_says_what_is_short_and_what_would_fit() -> None:
    inputs = (torch.randn(16, 64), torch.zeros(16, dtype=torch.long))
    with pytest.raises(InfeasibleError) as caught:
        autopar.plan(Mlp(), inputs, cluster=H100, memory_limit="80KiB")
    message = str(caught.value)
    assert re.search(r"no plan fits 80\.0 KiB per device on 4 devices: the smallest needs \d+\.\d KiB", message)
    assert "largest parts: parameters, gradients and optimizer state" in message
    assert "Recomputation and more micro-batches are part of the search and were not enough" in message
    assert re.search(r"or with 8-bit .*\) \(\d+\.\d KiB, predicted step .*, or with 8 devices \(", message), message
    assert re.search(r"It fits with offload='parameters' \(.* KiB, .* of the .* on its host, predicted step", message)
    plan = autopar.plan(Mlp(), inputs, cluster=H100, memory_limit="80KiB", offload="parameters")
    assert plan.predicted.peak_bytes <= 80 * 1024


def test_a_limit_that_no_change_meets_says_what_was_tried() -> None:
    with pytest.raises(
        InfeasibleError, match=r"Not enough, alone or two of them together: .*SGD.*8 devices.*32 devices"
    ):
        plan_tied(memory_limit=50)


def test_operators_without_a_rule_are_listed_when_strict() -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        autopar.plan(UncoveredModel(), (torch.randn(8, 8),), cluster=H100, strict=True)
    message = str(caught.value)
    assert "cube" in message
    assert "cube_backward" in message
    assert "register_rule" in message


def test_operators_without_a_rule_are_reported_with_their_cost(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="autopar"):
        plan = autopar.plan(UncoveredModel(), (torch.randn(8, 8),), cluster=H100)
    assert len(plan.uncovered) == 2
    assert all(seconds > 0.0 for seconds in plan.uncovered.values())
    assert all(name in caplog.text for name in plan.uncovered)
    assert all(f"no rule for {name}: replicated" in plan.summary() for name in plan.uncovered)


def test_parameters_do_not_exist_before_the_first_call() -> None:
    module = autopar.compile(tied_model())
    for method in (module.parameters, module.state_dict):
        with pytest.raises(ConfigurationError, match="call it once, or pass example_inputs"):
            list(method())


def test_a_batch_of_another_structure_is_an_error_of_capture() -> None:
    module = autopar.compile(tied_model(), tokens(0))
    with pytest.raises(CaptureError, match=r"do not fit TiedModel\.forward"):
        module(token=tokens(0)["tokens"])


def test_a_mesh_that_no_parameter_divides_by_is_no_crash(alone: Plan) -> None:
    edited = dataclasses.replace(alone.parameters["embedding.weight"], stored=(Shard(5),), used=(Shard(5),))
    plan = alone.with_(parameters={**alone.parameters, "embedding.weight": edited}, mesh=Mesh(("tp",), (1,)))
    with pytest.raises(PlanMismatchError, match=r"embedding\.weight: .*cannot lie as \['S\(5\)'\]"):
        autopar.compile(tied_model(), tokens(0), plan=plan)
