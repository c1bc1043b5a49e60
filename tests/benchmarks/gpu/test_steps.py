"""A carried plan that does not fit is not the end of a stage; ratios are those of the rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autopar
from autopar.hardware.cluster import Cluster
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.stage import Place
from benchmarks.gpu.steps import MIXED, compared, compiled, plain, plan_path, replayed


def test_a_plan_of_another_graph_is_made_again_and_the_row_says_why(tmp_path: Path) -> None:
    place = Place(device=torch.device("cpu"), rehearse=True, carried=tmp_path)
    other = MODELS["unet"].made("meta", tiny=True)
    plan = autopar.plan(other.model, dict(other.inputs), cluster="1 cpu", **MIXED)
    plan.save(plan_path(tmp_path, Cluster.detect(1), "gpt2", tiny=True))
    module, inputs, source = compiled(place, "gpt2", lambda: (MODELS["gpt2"].made("cpu", tiny=True), MIXED))
    assert source.startswith("made here: the plan was made for another graph")
    module(**inputs).backward()


def test_ratios_say_how_many_times_as_fast_ours_is() -> None:
    rows = {
        "autopar": {"seconds": 2.0, "peak_bytes": 100, "first_loss": 1.5},
        "eager": {"seconds": 3.0, "peak_bytes": 200, "first_loss": 1.0},
    }
    assert compared(rows) == {
        "case": "compared",
        "speed_of_eager": pytest.approx(1.5),
        "bytes_of_eager": pytest.approx(0.5),
        "loss_beside_eager": pytest.approx(0.5),
    }


def test_a_rehearsal_says_why_it_records_no_graphs() -> None:
    place = Place(device=torch.device("cpu"), rehearse=True)
    row = replayed(place, "gpt2", 1, {"seconds": 1.0, "first_loss": 4.0})
    assert row["refused"] == ["cuda_graphs=True records nothing: the module runs on cpu"]
    assert row["speed_of_run"] == pytest.approx(1.0 / row["seconds"])
    assert row["loss_beside_run"] == pytest.approx(row["first_loss"] - 4.0)


def test_what_does_not_fit_is_a_row_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")

    monkeypatch.setattr("benchmarks.gpu.steps.trained", full)
    row = plain(Place(device=torch.device("cpu"), rehearse=True), "gpt2", 2, lambda module: module)
    assert row == {"does_not_fit": "CUDA out of memory. Tried to allocate 1 GiB."}
