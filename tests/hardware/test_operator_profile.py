import dataclasses
from pathlib import Path

import pytest

from autopar.cost_models.operator_costs import operator_seconds
from autopar.cost_models.operator_sizes import RowSizes, sizes_of, whole
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.hardware.operator_profile import MeasuredKernel, OperatorProfile, load_profile, save_profile

CLUSTER = Cluster.parse("8 H100-SXM")
PROFILE = OperatorProfile(
    name="lab",
    device="NVIDIA H100 80GB HBM3",
    versions={"torch": "2.13"},
    date="2026-11-21T12:00:00Z",
    kernels=(
        MeasuredKernel(kind="gemm", dtype="bfloat16", sizes=(4096, 4096, 4096, 1), seconds=4e-4),
        MeasuredKernel(kind="gemm", dtype="bfloat16", sizes=(512, 4096, 4096, 1), seconds=5e-5),
        MeasuredKernel(kind="norm", dtype="bfloat16", sizes=(1e8, 4096), seconds=9e-5),
    ),
)


def product_seconds(cluster: Cluster, m: int, n: int, k: int, dtype: str = "bfloat16") -> float:
    sizes = sizes_of("mm", [(m, k), (k, n)], (m, n), whole(2))
    return float(operator_seconds(cluster.device, flops=2 * m * n * k, bytes_moved=0, dtype=dtype, sizes=sizes))


def norm_seconds(cluster: Cluster, nbytes: float, row: int) -> float:
    sizes = RowSizes(family="norm", row=row)
    return float(
        operator_seconds(cluster.device, flops=0, bytes_moved=nbytes, dtype="bfloat16", kind="memory", sizes=sizes)
    )


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path / "lab.json")
    assert load_profile(tmp_path / "lab.json") == PROFILE


def test_a_kernel_with_sizes_of_another_kind_is_refused(tmp_path: Path) -> None:
    wrong = MeasuredKernel(kind="norm", dtype="bfloat16", sizes=(4096, 4096, 4096, 1), seconds=1e-5)
    save_profile(dataclasses.replace(PROFILE, kernels=(wrong,)), tmp_path / "wrong.json")
    with pytest.raises(ConfigurationError, match="nbytes"):
        load_profile(tmp_path / "wrong.json")


def test_a_measured_kernel_costs_what_was_measured_and_its_neighbours_move_with_it() -> None:
    measured = CLUSTER.with_operator_profile(PROFILE)
    # what is bound by multiplying slows with the clock of a busy H100; what memory bounds does not
    assert product_seconds(measured, 4096, 4096, 4096) == pytest.approx(4e-4 / 0.88, rel=0.05)
    assert norm_seconds(measured, 1e8, 4096) == pytest.approx(9e-5, rel=1e-6)
    assert product_seconds(CLUSTER, 4096, 4096, 4096) < 3e-4
    near = product_seconds(measured, 4096, 4096, 4224) / product_seconds(CLUSTER, 4096, 4096, 4224)
    here = product_seconds(measured, 4096, 4096, 4096) / product_seconds(CLUSTER, 4096, 4096, 4096)
    assert near == pytest.approx(here, rel=0.05)


def test_a_dtype_without_a_measurement_keeps_its_curve() -> None:
    measured = CLUSTER.with_operator_profile(PROFILE)
    assert product_seconds(measured, 4096, 4096, 4096, "float32") == product_seconds(
        CLUSTER, 4096, 4096, 4096, "float32"
    )


def test_a_cluster_says_which_tier_prices_its_operators() -> None:
    assert "curves fitted on H100-SXM" in CLUSTER.profile
    assert "none fitted on L4" in Cluster.parse("4 L4").profile
    assert "roofline" in Cluster.parse("4 cpu").profile
    assert "measured on NVIDIA H100 80GB HBM3 (lab, 2026-11-21" in CLUSTER.with_operator_profile(PROFILE).profile


def test_the_profile_of_another_gpu_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="A100"):
        Cluster.parse("8 A100-80").with_operator_profile(PROFILE)


def test_a_cluster_with_curves_and_a_profile_survives_its_file(tmp_path: Path) -> None:
    measured = CLUSTER.with_operator_profile(PROFILE)
    measured.save(tmp_path / "cluster.json")
    assert Cluster.from_file(tmp_path / "cluster.json") == measured
    assert measured.fingerprint != CLUSTER.fingerprint
