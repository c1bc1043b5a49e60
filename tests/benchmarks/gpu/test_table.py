"""The table of stages fits the time and the files of a machine; what it measures runs here at tiny sizes."""

from __future__ import annotations

import json

import pytest
import torch

from autopar.runtime.kernels.registry import KERNELS
from benchmarks.gpu.goals import GOALS, verdicts
from benchmarks.gpu.kernels import check_close
from benchmarks.gpu.stage import Place, Row, Stage
from benchmarks.gpu.table import ALL_SECONDS, STAGE_SECONDS, STAGES

TINY = Place(device=torch.device("cpu"), rehearse=True)
QUICK = ("kernels", "attention", "allocator", "operators", "profile")
"""Stages that a second is enough for; `make rehearse` runs all."""


def test_stages_have_names_of_files_and_fit_the_day() -> None:
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").replace(".", "").isalnum() for name in names)
    assert max(stage.seconds for stage in STAGES) <= STAGE_SECONDS == 480
    assert sum(stage.seconds for stage in STAGES if stage.num_devices == 1) <= ALL_SECONDS == 1200


def test_a_rehearsal_has_the_arguments_of_the_real_run() -> None:
    for stage in STAGES:
        assert stage.full.keys() == stage.tiny.keys()


def test_goals_of_a_stage_are_of_stages_that_exist() -> None:
    for goal in GOALS:
        for wanted in goal.stages:
            assert any(stage.name.startswith(wanted) for stage in STAGES), f"{goal.name}: no stage {wanted}"


def test_a_missed_goal_is_written_down() -> None:
    (found,) = verdicts("steps-gpt2", [{"case": "compared", "speed_of_compile": 0.9}])
    assert found == {"goal": "torch.compile", "case": "compared", "value": 0.9, "at_least": 1.0, "met": False}
    assert verdicts("steps-unet", [{"case": "compared", "speed_of_compile": 0.9}]) == []


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage.name in QUICK], ids=lambda stage: stage.name)
def test_a_quick_stage_runs_here_without_an_error(stage: Stage) -> None:
    rows: list[Row] = list(stage.rows(TINY))
    assert [row for row in rows if "error" in row] == []
    assert len({row["case"] for row in rows}) == len(rows) > 3
    json.dumps(rows)


def test_every_kernel_of_ours_is_measured() -> None:
    (stage,) = [stage for stage in STAGES if stage.name == "kernels"]
    measured = {row["case"].split()[0] for row in stage.rows(TINY)}
    assert measured - {"copy", "product"} == set(KERNELS.kernels)


def test_results_that_differ_are_an_error_of_their_case() -> None:
    x = torch.randn(64, 64)
    assert check_close([x * 1.01], [x]) == [pytest.approx(0.01, rel=1e-3)]
    with pytest.raises(AssertionError, match=r"result 2 is 0\.02 of its norm away"):
        check_close([x, x * 1.02], [x, x])
