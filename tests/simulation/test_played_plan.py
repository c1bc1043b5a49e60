"""A plan, played from its lowered program: what the planner predicted from its tables, and a trace of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.plans.parallel_plan import Plan
from tests.cli.test_commands import TINY, autopar

pytestmark = pytest.mark.usefixtures("shared_captures")

TINY_OPTIONS = ("--batch", "8", "--seq", "16", "--cluster", "4 H100-SXM")


def plan_file(folder: Path, *options: str) -> Path:
    path = folder / "plan.json"
    done = autopar("plan", TINY, *TINY_OPTIONS, "--mode", "fast", *options, "-o", str(path))
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_file(tmp_path_factory.mktemp("plain"), "--dims", "dp_replicate=2,tp=2")


@pytest.fixture(scope="module", params=["1f1b", "zb-h1"])
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ("--dims", "pp=2,tp=2", "--schedule", request.param, "--micro-batches", "4")
    return plan_file(tmp_path_factory.mktemp("pipeline"), *options)


def simulated(path: Path, *options: str) -> dict[str, float]:
    done = autopar("simulate", str(path), "--trust", "--json", *options)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.exhaustive
def test_a_simulated_step_is_the_predicted_one(plain: Path) -> None:
    found = simulated(plain)
    assert found["step_seconds"] == pytest.approx(found["predicted_step_seconds"], rel=0.1)
    assert max(found["peak_bytes"]) == pytest.approx(found["predicted_peak_bytes"], rel=1e-3)
    assert 0 < found["exposed_communication_seconds"] < found["step_seconds"]
    assert found["bubble_rate"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.exhaustive(sample="zb-h1")
def test_a_simulated_pipeline_is_the_predicted_one(pipeline: Path) -> None:
    found = simulated(pipeline)
    assert len(found["peak_bytes"]) == 2
    assert found["step_seconds"] == pytest.approx(found["predicted_step_seconds"], rel=0.15)
    # the planner adds up blocks: the largest transient of each counts; messages on their way (3 % here) do not
    assert 0.7 < max(found["peak_bytes"]) / found["predicted_peak_bytes"] <= 1.05
    assert 0 < found["bubble_rate"] < 0.6


def test_a_trace_holds_every_rank_group_with_its_streams_and_its_bytes(pipeline: Path, tmp_path: Path) -> None:
    simulated(pipeline, "--trace", str(tmp_path / "step.json"))
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    tracks = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    assert {(0, "compute"), (1, "compute"), (0, "tp"), (1, "tp"), (0, "to its node"), (1, "to its node")} <= tracks
    passes = {event["name"].split()[0] for event in events if event["ph"] == "X"}
    assert {"0F0", "1F3", "optimizer"} <= passes
    for rank in (0, 1):
        live = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == rank]
        assert live[-1] == pytest.approx(min(live[10:]))  # states alone are left behind the step
        assert live[-1] < 0.7 * max(live)


@pytest.mark.exhaustive
def test_micro_batches_follow_each_other(tmp_path: Path) -> None:
    found = simulated(
        plan_file(tmp_path, "--dims", "dp_shard=4", "--micro-batches", "2"), "--trace", str(tmp_path / "t")
    )
    assert found["step_seconds"] == pytest.approx(found["predicted_step_seconds"], rel=0.15)
    names = [e["name"] for e in json.loads((tmp_path / "t").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(names) - len(set(names)) > len(set(names)) / 2


def test_a_plan_is_played_for_its_own_model_and_cluster_only(plain: Path) -> None:
    wrong = autopar("simulate", str(plain), "--trust", "--seq", "8")
    assert wrong.returncode == 2
    assert "another graph" in wrong.stderr
    small = autopar("simulate", str(plain), "--cluster", "2 H100-SXM")
    assert small.returncode == 2
    assert "4 ranks" in small.stderr


def test_a_plan_that_does_not_say_its_model_asks_for_it(plain: Path, tmp_path: Path) -> None:
    plan = Plan.load(plain)
    plan.with_(question={}).save(tmp_path / "bare.json")
    bare = autopar("simulate", str(tmp_path / "bare.json"))
    assert bare.returncode == 2
    assert "--model --batch --seq" in bare.stderr
