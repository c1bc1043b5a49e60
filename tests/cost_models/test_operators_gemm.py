from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models.operators_gemm import Rates, gemm_curve, gemm_seconds
from autopar.hardware.device_curves import GemmCurve, device_curves, physics_curves, shared_curves

RATES = Rates(flops_per_second=250e12, memory_bytes_per_second=1.7e12, sm_count=108, l2_bytes=40e6)
PLAIN = GemmCurve()
REAL = GemmCurve(
    quantisation=0.7, feed=0.1, prologue=64, resident_speedup=1.2, saturation=0.45, overlap=2.8, split_seconds=3e-6,
    split_traffic=0.3, launch_seconds=2e-6,
)  # fmt: skip


def test_a_product_of_full_waves_runs_at_the_rate() -> None:
    m, n, k = 128 * 12, 128 * 9, 4096  # one tile of 128 x 128 on each of 108 SMs
    assert gemm_seconds(RATES, PLAIN, m, n, k) == pytest.approx(2 * m * n * k / 250e12, rel=0.01)


def test_one_tile_more_than_a_wave_costs_another_wave() -> None:
    tiles = GemmCurve(batched_tiles=((128, 128),), split_seconds=1.0)
    rates = replace(RATES, memory_bytes_per_second=1e15)
    one, two = gemm_seconds(rates, tiles, 128, 128, 4096, batch=[108, 109])
    assert two == pytest.approx(2 * one, rel=0.02)
    half = GemmCurve(batched_tiles=((128, 128),), split_seconds=1.0, quantisation=0.5)
    assert gemm_seconds(rates, half, 128, 128, 4096, batch=109) == pytest.approx(1.5 * one, rel=0.02)


def test_few_tiles_are_split_along_k() -> None:
    splits = gemm_seconds(RATES, PLAIN, 128, 128, 65536)
    alone = 2 * 128 * 128 * 65536 / (250e12 / 108)
    assert splits < alone / 8


def test_one_token_reads_the_weights_at_the_memory_rate() -> None:
    seconds = gemm_seconds(RATES, PLAIN, 1, 8192, 8192)
    assert seconds == pytest.approx(2 * 8192 * 8192 / 1.7e12, rel=0.02)


def test_a_fp32_weight_gradient_that_is_accumulated_reads_and_writes_its_total() -> None:
    dims = (8192, 8192, 64)
    plain = gemm_seconds(RATES, PLAIN, *dims)
    wide = gemm_seconds(RATES, PLAIN, *dims, output_bytes=4, accumulate=True)
    assert wide - plain == pytest.approx((8 - 2) * 8192 * 8192 / 1.7e12, rel=0.05)


def test_cost_never_falls_with_k_or_the_batch_and_is_zero_without_elements() -> None:
    sizes = np.array([0, 1, 16, 64, 100, 256, 1000, 4096])
    along_k = gemm_seconds(RATES, REAL, 512, 512, sizes)
    assert along_k[0] == 0
    assert np.all(np.diff(along_k) >= 0)
    assert np.all(np.diff(gemm_seconds(RATES, REAL, 300, 500, 64, batch=sizes)) >= 0)


def test_many_shapes_at_once_cost_what_each_costs_alone() -> None:
    m, n, k = np.array([1, 100, 4096]), np.array([4096, 4096, 333]), np.array([512, 4096, 4096])
    together = gemm_seconds(RATES, REAL, m[:, None], n[None], 1024)
    assert together.shape == (3, 3)
    assert together[1, 2] == gemm_seconds(RATES, REAL, 100, 333, 1024)
    assert list(gemm_seconds(RATES, REAL, m, n, k)) == [
        float(gemm_seconds(RATES, REAL, *shape)) for shape in zip(m, n, k, strict=True)
    ]


@pytest.mark.parametrize(
    ("m", "n", "k", "measured"),
    [(4096, 22016, 4096, 3.3655e-3), (1024, 4096, 11008, 0.431e-3), (1, 12288, 4096, 65e-6), (128, 4096, 4096, 32e-6)],
)
def test_an_a100_takes_what_vidur_measured(m: int, n: int, k: int, measured: float) -> None:
    """Llama 2 7B in fp16 on an A100 (microsoft/vidur data/profiling/compute @7d47513)."""
    curves = device_curves("A100-80")
    rates = Rates(flops_per_second=271.2e12, memory_bytes_per_second=1.763735e12, sm_count=108, l2_bytes=40e6)
    assert gemm_seconds(rates, gemm_curve(curves, "float16"), m, n, k) == pytest.approx(measured, rel=0.2)
    without_tiles = GemmCurve(quantisation=0.0, overlap=8.0)
    if m == 4096:  # the mutation: no waves, no feeding, no prologue is 18 % too fast
        assert gemm_seconds(rates, without_tiles, m, n, k) < 0.9 * measured


def test_bfloat16_runs_on_the_units_of_float16_and_a_batch_by_its_own_kernels() -> None:
    curves = device_curves("A100-PCIE-80")
    assert gemm_curve(curves, "bfloat16") == gemm_curve(curves, "float16") != gemm_curve(curves, "float32")
    assert gemm_curve(curves, "float32", "batched").batched_tiles == ((128, 128),)
    assert gemm_curve(curves, "float16", "batched") == gemm_curve(curves, "float16")
    assert gemm_curve(physics_curves("A100-80"), "float16") == GemmCurve()


def test_a_device_without_fitted_constants_has_the_shared_ones_and_says_so() -> None:
    l4, a100 = device_curves("L4"), device_curves("A100-80")
    assert (l4.tier, a100.tier) == ("shared", "fitted")
    assert l4 == shared_curves("L4")
    assert l4.gemm["float16"] != a100.gemm["float16"]
    assert "A100-80" in a100.source
