"""Kernels of a profile: the list runs, says the right sizes, and prices plans for the GPU that it was measured on."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from autopar.cli.commands import commands
from autopar.cost_models.operator_costs import operator_seconds
from autopar.cost_models.operator_sizes import ProductSizes
from autopar.cost_models.operators_attention import NARROW
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.hardware.operator_profile import OperatorProfile, load_profile, save_profile
from autopar.runtime.calibration.operator_census import LARGE_AT_ONCE, NUM_SAMPLES, UPDATES, rounds
from autopar.runtime.calibration.profile_kernels import cases, measured, profile_of_gpu

SMALL = list(
    cases(
        hidden=(8,), rows=(4,), sequences=(16,), memory_rows=(4,), memory_widths=(8,), attention_tokens=16,
        dtypes=(torch.float32,),
    )
)  # fmt: skip


def _profile(device: str) -> OperatorProfile:
    calls: list[int] = []

    def timer(call: object) -> float:
        assert callable(call)
        call()
        calls.append(1)
        return 1e-3 * len(calls)

    steps: list[tuple[int, int]] = []
    kernels = measured(SMALL, torch.device("cpu"), timer, lambda done, of: steps.append((done, of)))
    assert steps == [(i + 1, len(SMALL)) for i in range(len(SMALL))]
    return OperatorProfile(name="test", device=device, versions={}, date="2026-11-21", kernels=kernels)


def test_every_case_runs_and_keeps_its_order() -> None:
    kernels = _profile("NVIDIA H100 80GB HBM3").kernels
    assert [k.seconds for k in kernels] == pytest.approx([1e-3 * (i + 1) for i in range(len(SMALL))])
    assert {k.kind for k in kernels} == {
        "gemm",
        "attention forward",
        "attention backward",
        "elementwise",
        "norm",
        "softmax",
    }
    assert {k.layout for k in kernels if k.kind == "gemm"} == {"TN", "NN", "NT"}


def test_a_measured_product_costs_what_was_measured(tmp_path: Path) -> None:
    save_profile(_profile("NVIDIA A100-SXM4-80GB"), tmp_path / "a100.json")
    cluster = Cluster.parse("8 A100-80").with_operator_profile(load_profile(tmp_path / "a100.json"))
    m, n, k, _ = SMALL[0].kernel.sizes
    same = [1e-3 * (i + 1) for i, case in enumerate(SMALL) if case.kernel.sizes == (m, n, k, 1)]
    seconds = operator_seconds(
        cluster.device, flops=2 * m * n * k, bytes_moved=0, dtype="float32", sizes=ProductSizes(m=m, n=n, k=k)
    )
    assert seconds == pytest.approx(statistics.geometric_mean(same))  # forms of one product are one size
    assert "measured on NVIDIA A100-SXM4-80GB" in cluster.profile
    with pytest.raises(ConfigurationError, match="was measured on"):
        Cluster.parse("8 H100-SXM").with_operator_profile(load_profile(tmp_path / "a100.json"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_there_is_no_kernel_to_measure() -> None:
    with pytest.raises(ConfigurationError, match="no CUDA device"):
        profile_of_gpu(lambda done, of: None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_profiled_within_its_bounds() -> None:
    profile = profile_of_gpu(lambda done, of: None)
    assert all(kernel.seconds > 0 for kernel in profile.kernels)


def test_the_census_names_each_operator_at_several_amounts_of_work() -> None:
    found: dict[str, list[float]] = {}
    for sample in itertools.chain.from_iterable(rounds()):
        found.setdefault(sample.name, []).append(sample.work)
    assert sum(map(len, found.values())) == NUM_SAMPLES
    assert all(len(set(work)) >= 3 for name, work in found.items() if not name.endswith(NARROW))


def test_operators_of_like_sizes_take_turns_and_updates_have_their_own() -> None:
    turns = [[sample.name for sample in turn] for turn in rounds()]
    assert all(set(turn) == set(UPDATES) or not set(turn) & set(UPDATES) for turn in turns)
    shared = [turn for turn in turns if set(turn) != set(UPDATES)]
    assert [{"mm", "attention", "add", "embedding"} <= set(turn) for turn in shared[:4]] == [True] * 4
    assert all(len(turn) <= LARGE_AT_ONCE for turn in shared[4:])


def test_the_command_shows_an_example() -> None:
    result = CliRunner().invoke(commands, ["profile", "--help"])
    assert result.exit_code == 0
    assert "autopar profile --force -o profile.json" in result.output
