from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models.operator_costs import operator_seconds
from autopar.cost_models.operator_sizes import AttentionSizes
from autopar.cost_models.operators_attention import attention_curve, attention_seconds, causal_share_on_cpu
from autopar.cost_models.operators_gemm import Rates
from autopar.hardware.cluster import Cluster
from autopar.hardware.device_curves import AttentionCurve, device_curves
from autopar.hardware.devices import Device, OperatorCurve

RATES = Rates(flops_per_second=252.9e12, memory_bytes_per_second=1.674e12, sm_count=108, l2_bytes=40e6)
CURVES = device_curves("A100-PCIE-80")
DEVICE = Cluster.parse("4 cpu").device
LLAMA = {"heads": 32, "key_heads": 8, "queries": 4096, "keys": 4096, "qk_dim": 128, "v_dim": 128}


def test_plain_physics_is_flops_over_rate_for_many_blocks() -> None:
    curve = AttentionCurve()
    seconds = attention_seconds(RATES, curve, **{**LLAMA, "heads": 108 * 32})
    flops = 4 * 108 * 32 * 4096 * 4096 * 128
    assert seconds == pytest.approx(flops / 252.9e12, rel=0.02)


def test_a_causal_mask_halves_many_heads_and_saves_less_of_few() -> None:
    curve = AttentionCurve(tail=0.5)

    def share(heads: int) -> float:
        sizes = {**LLAMA, "heads": heads, "key_heads": heads}
        return float(
            attention_seconds(RATES, curve, causal=True, **sizes)
            / attention_seconds(RATES, curve, causal=False, **sizes)
        )

    assert share(512) == pytest.approx(0.5, abs=0.02)
    assert share(2) > 0.6


@pytest.mark.parametrize(
    ("heads", "key_heads", "backward", "efficiency"),
    [
        (32, 8, False, 1.13197),
        (8, 2, False, 0.77678),
        (64, 8, False, 1.18701),
        (32, 8, True, 0.97639),
        (8, 2, True, 0.76285),
    ],
)
def test_an_a100_takes_what_simumax_measured(heads: int, key_heads: int, backward: bool, efficiency: float) -> None:
    """Causal attention of 4096 tokens, FLOPs counted without the mask (MooreThreads/SimuMax configs @4dcaae5)."""
    curve = attention_curve(CURVES, backward)
    sizes = {**LLAMA, "heads": heads, "key_heads": key_heads}
    seconds = attention_seconds(RATES, curve, causal=True, backward=backward, **sizes)
    measured = (5 if backward else 2) * heads * 4096**2 * 256 / (312e12 * efficiency)
    assert seconds == pytest.approx(measured, rel=0.1)
    unmasked = attention_seconds(RATES, curve, causal=False, backward=backward, **sizes)
    assert unmasked > 1.4 * measured  # the mutation: forgetting the mask


def test_all_arrays_broadcast() -> None:
    seconds = attention_seconds(
        RATES, attention_curve(CURVES, True), **{**LLAMA, "heads": np.array([1, 8, 64])}, backward=True
    )
    assert seconds.shape == (3,)
    assert np.all(np.diff(seconds) > 0)


@pytest.mark.parametrize(
    ("queries", "keys", "share"),
    [(512, 512, 1.0), (1024, 1024, 0.75), (2048, 2048, 0.625), (1024, 2048, 0.875), (64, 2048, 1.0), (96, 64, 1.0)],
)
def test_a_causal_mask_on_a_cpu_saves_whole_blocks_of_keys(queries: int, keys: int, share: float) -> None:
    assert causal_share_on_cpu(queries, keys) == pytest.approx(share)


@pytest.mark.parametrize("backward", [False, True])
def test_a_cpu_pays_the_softmax_of_a_pair_whatever_the_width_of_its_heads(backward: bool) -> None:
    """Nanoseconds of a pair are a line in the dims of a head: measured, see `CPU_SOFTMAX_DIMS`."""
    measured = {16: 2.33, 32: 3.85, 64: 6.68, 128: 12.76} if backward else {16: 0.91, 32: 1.49, 64: 2.65, 128: 5.04}
    for dims, nanoseconds in measured.items():
        found = _on_a_cpu(DEVICE, dims, backward) / _on_a_cpu(DEVICE, 64, backward)
        assert found == pytest.approx(nanoseconds / measured[64], rel=0.04)


def test_a_measured_cpu_pays_the_softmax_that_its_narrow_heads_show() -> None:
    """Of 2**20 pairs at 3.7 ns with heads of 64 and 1.5 ns with heads of 16, the line through both."""
    pairs, curves = 2.0**20, []
    for name, dims, nanoseconds in (("attention", 64, 3.7), ("attention_narrow", 16, 1.5)):
        curves.append(OperatorCurve(
            operator=name, dtype="float32", work=(4 * dims * pairs,), seconds=(1e-9 * nanoseconds * pairs,)
        ))
    device = replace(DEVICE, operators=tuple(curves))
    per_pair = {dims: _on_a_cpu(device, dims, False) / (2 * 4096**2) * 1e9 for dims in (16, 32, 64)}
    assert per_pair == pytest.approx({16: 1.5, 32: 1.5 + (3.7 - 1.5) / 3, 64: 3.7})


def _on_a_cpu(device: Device, dims: int, backward: bool) -> float:
    """Seconds of 2 heads of 4,096 tokens, without a mask."""
    sizes = AttentionSizes(
        batch=1, heads=2, queries_per_key=1, queries=4096, keys=4096, qk_dim=dims, v_dim=dims,
        causal=False, backward=backward,
    )  # fmt: skip
    flops = (5 if backward else 2) * 2 * 2 * 4096 * 4096 * dims
    return float(operator_seconds(
        device, flops=flops, bytes_moved=0, dtype="float32", kind="attention", kernels=0, sizes=sizes,
        operator="attention_backward" if backward else "attention",
    ))  # fmt: skip


def test_a_cpu_is_priced_by_what_its_causal_kernel_computes() -> None:
    sizes = AttentionSizes(
        batch=2, heads=8, queries_per_key=1, queries=np.array([2048, 1024, 512]), keys=2048, qk_dim=64, v_dim=64,
        causal=True, backward=False,
    )  # fmt: skip

    def seconds(sizes: AttentionSizes) -> np.ndarray:
        flops = 4.0 * 2 * 8 * 64 * 2048 * np.asarray(sizes.queries)
        return operator_seconds(
            Cluster.parse("4 cpu").device,
            flops=flops,
            bytes_moved=0.0,
            dtype="float32",
            kind="attention",
            kernels=0,
            sizes=sizes,
        )

    whole = seconds(replace(sizes, causal=False))
    np.testing.assert_allclose(seconds(sizes) / whole, [0.625, 0.875, 1.0])
    np.testing.assert_allclose(seconds(sizes) / seconds(sizes)[0], [1.0, 0.7, 0.4])
