import numpy as np
import pytest

from autopar.cost_models.operators_gemm import Rates
from autopar.cost_models.operators_memory import lookup_row, memory_curve, memory_seconds
from autopar.hardware.device_curves import MemoryCurve, device_curves

RATES = Rates(flops_per_second=271.2e12, memory_bytes_per_second=1.763735e12, sm_count=108, l2_bytes=40e6)


def test_a_large_kernel_runs_at_the_memory_rate_and_a_small_one_takes_its_launch() -> None:
    curve = MemoryCurve(launch_seconds=2e-6)
    assert memory_seconds(RATES, curve, 1.763735e9) == pytest.approx(1e-3, rel=0.01)
    assert memory_seconds(RATES, curve, 100) == pytest.approx(2e-6, rel=0.01)
    assert memory_seconds(RATES, curve, 0, launches=0) == 0


def test_what_fits_the_cache_is_faster_than_memory() -> None:
    curve = MemoryCurve(resident_speedup=2.0)
    small, large = memory_seconds(RATES, curve, [4e6, 4e9])
    assert large / small > 1900


def test_a_long_row_takes_its_time_however_few_rows_there_are() -> None:
    curve = MemoryCurve(row_seconds=5e-10)
    assert memory_seconds(RATES, curve, 2 * 8192, row=8192) == pytest.approx(4.1e-6, rel=0.01)


def test_rows_that_leave_the_multiprocessor_are_read_again() -> None:
    curve = MemoryCurve(reread_row_bytes=32768, reread=0.5)
    short, long = memory_seconds(RATES, curve, 1e9, row=[8192, 16384], element_bytes=4)
    assert long == pytest.approx(1.5 * short)


def test_cost_grows_with_bytes() -> None:
    curve = memory_curve(device_curves("A100-80"), "norm")
    seconds = memory_seconds(RATES, curve, np.geomspace(1e3, 1e10, 50), row=4096)
    assert np.all(np.diff(seconds) > 0)


@pytest.mark.parametrize(
    ("family", "nbytes", "row", "measured"),
    [
        ("elementwise", 3 * 4096 * 4096 * 2, 0, 55e-6),
        ("norm", 2 * 4096 * 4096 * 2, 4096, 105e-6),
        ("norm", 2 * 8192, 4096, 5e-6),
        ("gated", 3 * 4096 * 11008 * 2, 11008, 266e-6),
        ("lookup", 2 * 4096 * 4096 * 2, 4096, 234e-6),
    ],
)
def test_an_a100_takes_what_vidur_measured(family: str, nbytes: int, row: int, measured: float) -> None:
    """Llama 2 7B in fp16 on an A100, 4096 tokens or one (microsoft/vidur data/profiling/compute @7d47513)."""
    curves = device_curves("A100-80")
    seconds = memory_seconds(RATES, memory_curve(curves, family), nbytes, row=row)
    assert seconds == pytest.approx(measured, rel=0.2)
    if family in ("gated", "lookup"):  # the mutation: one rate for every family is wrong by a third and more
        assert memory_seconds(RATES, memory_curve(curves, "elementwise"), nbytes) < 0.7 * measured


def test_few_lookups_are_walked_one_after_the_other() -> None:
    assert list(lookup_row([1, 16, 17], 4096)) == [4096, 16 * 4096, 4096]


def test_a_family_without_constants_is_priced_as_element_wise() -> None:
    curves = device_curves("B200-SXM")
    assert memory_curve(curves, "made up") == memory_curve(curves, "elementwise")
