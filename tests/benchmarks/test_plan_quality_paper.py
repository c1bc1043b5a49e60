"""The plans that the exhaustive check enumerates, and the rows and the plot of scaling on paper."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch

from autopar.hardware.cluster import Cluster
from benchmarks.plan_quality.exhaustive import all_plans, wishes
from benchmarks.plan_quality.models import Pair
from benchmarks.plan_quality.plans import CHOSEN, same_choices
from benchmarks.plan_quality.scaling import CASES, grid_setting
from benchmarks.plan_quality.scaling_plot import BAR, COLOURS, plot
from benchmarks.plan_quality.settings import Setting, vectors
from benchmarks.published_plans import grid_meshes

SVG = "{http://www.w3.org/2000/svg}"
ROW = {
    "name": "small@64",
    "autopar_seconds": 1.0,
    "megatron_seconds": 1.5,
    "expert_seconds": 2.0,
    "zero3_seconds": 9.0,
    "ddp_seconds": None,
}


def test_all_plans_of_a_pair_differ_and_are_few_enough_to_be_measured() -> None:
    setting = Setting(preset="flat-200mbit", build=lambda: Pair(8, 16), inputs=vectors(8, 8))
    plans = all_plans(setting, Cluster.parse("4x1 cpu @ 0.2Gb"))
    assert 20 <= len(plans) <= 100
    names = list(plans)
    assert names[0] == CHOSEN
    pairs = [(a, b) for place, a in enumerate(names) for b in names[:place]]
    assert not any(same_choices(plans[a], plans[b]) for a, b in pairs)
    cheapest = min(plans.values(), key=lambda plan: plan.objective_seconds)
    assert plans[CHOSEN].objective_seconds == pytest.approx(cheapest.objective_seconds)


def test_wishes_are_all_combinations() -> None:
    found = {tuple(wish.values()) for wish in wishes()}
    assert len(found) == 3**4
    assert ("S(0)", "S(1)", "S(1)", "R") in found


def test_bars_are_as_tall_as_the_ratio_and_what_does_not_fit_has_a_cross() -> None:
    picture = ElementTree.fromstring(plot([ROW]))
    bars = {
        bar.get("fill"): float(bar.get("height", 0))
        for bar in picture.iter(f"{SVG}rect")
        if bar.get("width") == str(BAR - 2)
    }
    assert bars[COLOURS["megatron"]] == pytest.approx(1.5 * bars[COLOURS["autopar"]], rel=1e-2)
    assert bars[COLOURS["zero3"]] == pytest.approx(3.0 * bars[COLOURS["autopar"]], rel=1e-2), "cut"
    assert COLOURS["ddp"] not in bars
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"9.0", "x", "small@64"} <= set(texts)


@pytest.mark.parametrize("name", list(CASES))
def test_every_case_has_a_grid_whose_micro_batches_split(name: str) -> None:
    case = CASES[name]
    meshes = grid_meshes(grid_setting(case))
    assert any(case.batch % (count * mesh.shape[0]) == 0 for mesh in meshes for count in case.micro_batches)
    assert case.cluster.num_devices == case.gpus


@pytest.mark.parametrize("name", list(CASES))
def test_an_experts_plan_takes_all_devices_and_splits_the_batch(name: str) -> None:
    case = CASES[name]
    expert, copies = case.expert, case.gpus // (case.expert.tp * case.expert.pp)
    assert copies * expert.tp * expert.pp == case.gpus
    assert case.batch % (copies * expert.samples) == 0
    assert case.layers % (expert.pp * expert.chunks) == 0
    assert expert.chunks == 1 or case.batch // (copies * expert.samples) % expert.pp == 0, "interleaved"


def test_pairs_train() -> None:
    x = torch.randn(4, 8)
    assert Pair(8, 16)(x, x).shape == ()
