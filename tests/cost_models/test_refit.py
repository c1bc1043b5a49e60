"""Measured beside predicted, turned into a cluster that predicts what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopar.cli.calibrate_command import calibrate
from autopar.cost_models.collective_costs import collective_seconds
from autopar.cost_models.refit import Tiers, read_steps, refitted, tiers_of
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import CollectiveFit
from autopar.hardware.group_topology import GroupTopology

PREDICTED = {"seconds": 1.0, "exposed_communication_seconds": 0.4, "peak_bytes": 100}


def _write(path: Path, *steps: tuple[float, float | None], predicted: dict[str, float] = PREDICTED) -> Path:
    lines = [
        {"step": i, "seconds": seconds, "exposed_communication_seconds": exposed, "predicted": predicted}
        for i, (seconds, exposed) in enumerate(steps)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_parts_of_a_step_are_fitted_apart_and_the_first_is_left_out(tmp_path: Path) -> None:
    log = _write(tmp_path / "run.jsonl", (9.0, 5.0), (1.5, 0.6), (1.5, 0.6), (30.0, 29.0), (1.5, 0.6))
    assert tiers_of(read_steps(log)) == Tiers(compute=pytest.approx(1.5), communication=pytest.approx(1.5))
    log = _write(tmp_path / "run.jsonl", (9.0, 5.0), *[(1.4, 0.2)] * 3)
    assert tiers_of(read_steps(log)) == Tiers(compute=pytest.approx(2.0), communication=pytest.approx(0.5))


def test_a_part_that_is_not_predicted_says_nothing(tmp_path: Path) -> None:
    alone = {**PREDICTED, "exposed_communication_seconds": 0.0}
    log = _write(tmp_path / "run.jsonl", *[(1.2, 0.0)] * 4, predicted=alone)
    assert tiers_of(read_steps(log)) == Tiers(compute=pytest.approx(1.2), communication=1.0)
    log = _write(tmp_path / "run.jsonl", *[(1.2, None)] * 4)  # a GPU
    assert tiers_of(read_steps(log)) == Tiers(compute=pytest.approx(1.2), communication=pytest.approx(1.2))


def test_hidden_communication_does_not_scale_the_links(tmp_path: Path) -> None:
    hidden = {**PREDICTED, "exposed_communication_seconds": 0.04}
    log = _write(tmp_path / "run.jsonl", *[(0.8, 0.16)] * 4, predicted=hidden)
    assert tiers_of(read_steps(log)) == Tiers(compute=pytest.approx(0.8), communication=1.0)


def test_the_refitted_cluster_takes_as_much_longer(tmp_path: Path) -> None:
    cluster = Cluster.parse("2x2 cpu")
    new = refitted(cluster, Tiers(compute=2.0, communication=3.0))
    topology = GroupTopology.of(cluster, (4,), (0,))
    before, after = (float(collective_seconds("all_gather", 1e9, topology, one)) for one in (cluster, new))
    assert after == pytest.approx(3.0 * before, rel=0.01)
    assert new.device.memory_bytes_per_second == cluster.device.memory_bytes_per_second / 2.0
    assert "communication x 3" in new.profile


def test_measured_lines_are_scaled_too() -> None:
    cluster = Cluster.parse("4x1 cpu")
    line = CollectiveFit(kind="all_reduce", ranks=4, latency_seconds=1e-3, bytes_per_second=1e7)
    measured = refitted(_with_line(cluster, line), Tiers(compute=1.0, communication=2.0))
    seconds = collective_seconds("all_reduce", 1e7, GroupTopology.of(cluster, (4,), (0,)), measured)
    assert float(seconds) == pytest.approx(2.002)


def _with_line(cluster: Cluster, line: CollectiveFit) -> Cluster:
    return replace(cluster, inter_link=replace(cluster.inter_link, fits=(line,)))


@pytest.mark.parametrize(
    ("steps", "says"),
    [([(1.0, 0.4)] * 3, "3 steps: log 4 or more"), ([(90.0, 0.4)] * 4, "compute took 149 times")],
)
def test_logs_that_say_nothing_are_refused(tmp_path: Path, steps: list[tuple[float, float]], says: str) -> None:
    log = _write(tmp_path / "run.jsonl", *steps)
    with pytest.raises(ConfigurationError, match=says):
        tiers_of(read_steps(log))


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"seconds": "many"}\n')
    with pytest.raises(ConfigurationError, match=r"run\.jsonl is not a log of steps"):
        read_steps(tmp_path / "run.jsonl")


def test_the_command_writes_a_cluster_that_plans_can_be_made_for(tmp_path: Path) -> None:
    Cluster.parse("4 cpu").save(tmp_path / "cluster.json")
    log = _write(tmp_path / "run.jsonl", *[(1.4, 0.2)] * 4)
    output = tmp_path / "new.json"
    done = CliRunner().invoke(calibrate, [str(tmp_path / "cluster.json"), str(log), "-o", str(output), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["compute"] == pytest.approx(2.0)
    assert Cluster.from_file(output).device.launch_seconds == pytest.approx(
        2.0 * Cluster.parse("4 cpu").device.launch_seconds
    )
