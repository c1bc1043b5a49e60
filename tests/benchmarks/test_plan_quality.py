"""What the plan quality benchmark makes of its steps, and which models it can express."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import AutoparError
from benchmarks.plan_quality.baselines import BASELINES
from benchmarks.plan_quality.baselines.pipelining import micro_batches, stage_of
from benchmarks.plan_quality.bootstrap import slowdown
from benchmarks.plan_quality.job import wants_more
from benchmarks.plan_quality.models import chain_loss, gpt, llama, mixture, recommender, vit
from benchmarks.plan_quality.plans import SAME_AS
from benchmarks.plan_quality.rows import exposed, link_bytes, measured_runs, runtime_ratios, setting_row
from benchmarks.plan_quality.searches import galvatron, megatron, style
from benchmarks.plan_quality.settings import QUICK, SETTINGS
from benchmarks.plan_quality.summary import summary, tau_beyond_chance
from benchmarks.vision import UNet

MODELS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "gpt": (gpt(layers=4, width=16, heads=4, vocabulary=32, positions=8), torch.randint(0, 32, (4, 8))),
    "llama": (
        llama(layers=4, width=32, hidden=48, heads=4, kv_heads=2, vocabulary=32),
        torch.randint(0, 32, (4, 8)),
    ),
    "moe": (
        mixture(layers=4, width=16, hidden=24, heads=4, experts=4, chosen=2, vocabulary=32),
        torch.randint(0, 32, (4, 8)),
    ),
    "vit": (vit(layers=4, width=16, heads=4, size=16, patch=4, classes=8), torch.randn(4, 3, 16, 16)),
    "recommender": (recommender(rows=16, width=4, fields=4, hidden=32, layers=4), torch.randint(0, 16, (4, 4))),
}


def test_experts_are_one_product_a_matrix() -> None:
    """Read otherwise, every expert computes all rows: four times the seconds of a mixture of eight."""
    model, tokens = MODELS["moe"]
    program = capture(model, (), {"x": tokens, "labels": tokens})
    products = program.graph.find_nodes(op="call_function", target=torch.ops.autopar.expert_linear.default)
    assert sum(node.meta["phase"] == "forward" for node in products) == 3 * 4


def steps(*seconds: float, loss: float = 1.0) -> list[dict[str, Any]]:
    """Steps of one run on two nodes."""
    return [
        {
            "seconds": each,
            "cpu_seconds": [0.1, 0.2],
            "waited_seconds": [0.3, 0.4],
            "loss": loss,
            "sent_bytes": [[0, 10], [20, 0]],
        }
        for each in seconds
    ]


def row_of(rows: dict[str, list[dict[str, Any]]], **predicted: float) -> dict[str, Any]:
    said = {
        name: {"seconds": seconds, "peak_bytes": 100.0, "sent_bytes": [15.0, 15.0], "is_pipeline": False}
        for name, seconds in predicted.items()
    }
    peaks = dict.fromkeys(said, 110.0)
    runs = measured_runs(rows, 1, dict.fromkeys(rows, "a plan"), said, peaks)
    return setting_row("small", "2x1", runs, {"1f1b": "no chain"}, {"training": 12.34})


def test_a_row_names_the_winner_and_the_best_baseline() -> None:
    rows = {
        "autopar": steps(9.0, 1.0, 1.1, 1.0),
        "ddp": steps(9.0, 2.0, 2.1, 2.2),
        "1f1b": steps(9.0, 0.5, 0.5, 0.5),
        "fsdp2-kept": steps(9.0, 1.9, 1.8, 2.0),
    }
    row = row_of(rows, autopar=1.2)
    assert (row["chosen_seconds"], row["predicted_seconds"]) == (1.0, 1.2)
    assert (row["best_measured_seconds"], row["best_measured"]) == (0.5, "1f1b")
    assert (row["best_baseline_seconds"], row["best_baseline"]) == (1.9, "fsdp2-kept")
    assert row["significantly_slower"]
    assert row["significantly_faster"]
    assert row["left_out"] == {"1f1b": "no chain"}
    assert row["elapsed_seconds"] == {"training": 12.3}
    assert [run["name"] for run in row["runs"]] == ["1f1b", "autopar", "fsdp2-kept", "ddp"]


def test_a_run_with_other_losses_wins_nothing_and_is_named() -> None:
    rows = {
        "autopar": steps(9.0, 1.0),
        "ddp": steps(9.0, 2.0),
        "alone": steps(9.0, 3.0),
        "1f1b": steps(9.0, 0.5, loss=1.0 + 2e-5),
    }
    row = row_of(rows, autopar=1.0)
    assert row["best_measured"] == "autopar"
    assert row["wrong_losses"] == {"1f1b": pytest.approx(2e-5, rel=1e-3)}


def test_a_choice_with_other_losses_is_no_result() -> None:
    rows = {name: steps(9.0, 2.0) for name in ("ddp", "alone")} | {"autopar": steps(9.0, 1.0, loss=1.1)}
    with pytest.raises(AutoparError, match=r"losses differ by 1.0e-01"):
        row_of(rows, autopar=1.0)


def test_the_runtime_is_compared_with_the_faster_variant_of_a_baseline() -> None:
    rows = {
        "autopar": steps(9.0, 1.0),
        "autopar as fsdp2": steps(9.0, 2.0),
        "fsdp2": steps(9.0, 4.0),
        "fsdp2-kept": steps(9.0, 2.5),
    }
    assert row_of(rows, autopar=1.0)["runtime_ratios"] == {"fsdp2": pytest.approx(0.8)}


def test_a_baselines_plan_that_we_chose_ourselves_is_compared_too() -> None:
    runs = {name: {"seconds": seconds} for name, seconds in (("autopar", 1.0), ("ddp", 1.25), ("tp", 2.0))}
    left_out = {"autopar as ddp": f"{SAME_AS}'autopar'", "autopar as tp": "does not fit"}
    assert runtime_ratios(runs, left_out) == {"ddp": pytest.approx(0.8)}


def test_the_ranking_of_our_plans_is_scored() -> None:
    rows = {"autopar": steps(9.0, 1.0), "autopar as ddp": steps(9.0, 2.0), "ddp": steps(9.0, 2.0)}
    assert row_of(rows, **{"autopar": 1.0, "autopar as ddp": 3.0})["kendall_tau"] == 1.0
    assert row_of(rows, **{"autopar": 1.0, "autopar as ddp": 0.5})["kendall_tau"] == -1.0


def test_the_ranking_beyond_chance_counts_pairs_of_which_one_is_slower_beyond_chance() -> None:
    rows = {"autopar": steps(9.0, 1.0, 1.2, 1.1), "autopar as ddp": steps(9.0, 1.05, 1.25, 1.15)}
    rows |= {"ddp": steps(9.0, 2.0, 2.0, 2.0)}
    tied = row_of(rows, **{"autopar": 1.1, "autopar as ddp": 1.0})
    assert tied["kendall_tau"] == -1.0
    assert tau_beyond_chance(tied) is None
    rows |= {"autopar as tp": steps(9.0, 2.0, 2.1, 2.0)}
    assert tau_beyond_chance(row_of(rows, **{"autopar": 1.1, "autopar as ddp": 1.0, "autopar as tp": 3.0})) == 1.0
    assert tau_beyond_chance(row_of(rows, **{"autopar": 1.1, "autopar as ddp": 1.0, "autopar as tp": 1.05})) == 0.0


def test_the_summary_counts_settings_and_takes_medians() -> None:
    won = row_of({"autopar": steps(9.0, 1.0, 1.0), "ddp": steps(9.0, 2.0, 2.0)}, autopar=1.1)
    lost = row_of({"autopar": steps(9.0, 2.0, 2.0), "ddp": steps(9.0, 1.0, 1.0)}, autopar=2.2)
    tied = row_of({"autopar": steps(9.0, 1.0, 1.2), "ddp": steps(9.0, 1.1, 1.2)}, autopar=1.21)
    found = summary([won, lost, tied])
    assert (found["settings"], found["chosen_is_best"]) == (3, 2)
    assert (found["faster_than_baselines"], found["ties_with_baselines"]) == (1, 1)
    assert found["median_step_error"] == pytest.approx(0.1)
    assert found["median_memory_error"] == pytest.approx(1.0 / 11.0)
    assert found["median_bytes_error"] == 0.0


def test_waits_are_those_of_our_plans_without_stages() -> None:
    timed = steps(1.0, 1.0)
    assert exposed(timed, {"is_pipeline": False}) == 0.4
    assert exposed(timed, {"is_pipeline": True}) is None
    assert exposed(timed, None) is None


def test_slow_runs_stop_early_and_what_is_compared_later() -> None:
    rows = {"autopar": steps(9.0, 1.0), "zero1": steps(9.0, 2.6), "tp": steps(9.0, 4.0), "1f1b": steps(9.0, 2.4)}
    assert [name for name in rows if wants_more(name, rows, 1)] == ["autopar", "tp", "1f1b"]
    rows = {"autopar": steps(9.0, 1.0, 1.0), "zero1": steps(9.0, 2.6), "tp": steps(9.0, 4.0, 4.0)}
    assert [name for name in rows if wants_more(name, rows, 2)] == ["autopar"]
    rows = {"autopar": steps(9.0, 1.0), "autopar without pipeline": steps(9.0, 4.0), "alone": steps(9.0, 4.0)}
    assert [name for name in rows if wants_more(name, rows, 1)] == ["autopar", "autopar without pipeline"]


def test_a_search_offers_plans_of_all_ranks_and_only_wishes_that_the_model_has() -> None:
    model = MODELS["gpt"][0]
    grid = [candidate["dims"] for candidate in megatron(model, 4, 8)]
    assert len(grid) == 6
    assert all(math.prod(dims.values()) == 4 for dims in grid)
    names = {*dict(model.named_parameters()), *dict(model.named_modules())}
    mixed = [candidate["constraints"] for candidate in galvatron(model, 4, 8) if "constraints" in candidate]
    assert len(mixed) == 6
    assert all(set(wishes) <= names for wishes in mixed)
    assert style(model, "layers.*", "tp")["layers.0.feed_forward.down.weight"] == "S(1)"
    assert style(model, "layers.*", "tp")["layers.3"] == "R"
    assert not any("constraints" in candidate for candidate in galvatron(UNet(channels=(32, 64), classes=4), 4, 8))


def test_bytes_are_medians_per_link() -> None:
    timed = steps(1.0, 1.0, 1.0)
    timed[1]["sent_bytes"] = [[0, 99], [20, 0]]
    assert link_bytes(timed) == [[0, 10], [20, 0]]


def test_noise_is_no_slowdown() -> None:
    noisy = slowdown([1.0, 1.4, 0.9, 1.2, 1.0], [1.1, 0.9, 1.0, 1.3, 1.0])
    clear = slowdown([1.3, 1.31, 1.32, 1.3, 1.33], [1.0, 1.01, 1.0, 1.02, 1.0])
    assert not noisy.significant
    assert clear.significant
    assert clear.low < clear.ratio < clear.high


@pytest.mark.parametrize("name", list(MODELS))
def test_the_stages_of_a_chain_are_the_chain(name: str) -> None:
    model, x = MODELS[name]
    hidden = x
    for index in range(4):
        hidden = stage_of(model, index, 4)(hidden)
    labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64)
    assert torch.equal(chain_loss(hidden, labels), model(x, labels))


def test_what_cannot_be_expressed_has_a_reason() -> None:
    unet = UNet(channels=(32, 64), classes=4)
    shallow = gpt(layers=2, width=16, heads=4, vocabulary=32, positions=8)
    reasons = {name: baseline.why_not(unet) for name, baseline in BASELINES.items()}
    assert {name for name, reason in reasons.items() if reason} == {"tp", "tp-ddp", "tp-fsdp2", "1f1b", "1f1b-ddp"}
    assert "skips of UNet" in str(reasons["1f1b"])
    assert [name for name, baseline in BASELINES.items() if baseline.why_not(shallow)] == ["1f1b"]


def test_every_setting_has_seven_baselines_and_a_batch_that_four_ranks_share() -> None:
    assert len(SETTINGS) >= 16
    assert set(QUICK) <= set(SETTINGS)
    for name, setting in SETTINGS.items():
        with torch.device("meta"):
            model, inputs = setting.model_and_inputs()
        assert sum(baseline.why_not(model) is None for baseline in BASELINES.values()) >= 7, name
        assert all(len(value) % setting.network.num_ranks == 0 for value in inputs.values()), name


def test_micro_batches_divide_the_batch() -> None:
    assert [micro_batches(batch) for batch in (16, 12, 4, 1)] == [8, 6, 4, 1]
