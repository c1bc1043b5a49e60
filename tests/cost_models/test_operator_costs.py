from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models.operator_costs import (
    copy_seconds,
    element_flops,
    matmul_flops_per_second,
    operator_seconds,
)
from autopar.cost_models.operator_sizes import AttentionSizes, MlpSizes, ProductSizes, sizes_of, whole
from autopar.cost_models.sustained import AttentionKernel, attention_speed
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster

H100 = Cluster.parse("8 H100").device
CPU = Cluster.parse("4 cpu").device


def test_a_large_matmul_runs_at_the_ceiling_that_a_busy_device_keeps() -> None:
    n = 8192
    seconds = operator_seconds(H100, flops=2 * n**3, bytes_moved=3 * 2 * n * n, dtype="bfloat16")
    assert 2 * n**3 / seconds == pytest.approx(0.88 * 794.5e12, rel=0.01)


def test_a_thin_matmul_is_bound_by_memory() -> None:
    n = 8192
    seconds = operator_seconds(H100, flops=2 * n * n, bytes_moved=2 * n * n, dtype="bfloat16")
    assert seconds == pytest.approx(H100.launch_seconds + 2 * n * n / H100.memory_bytes_per_second)


@pytest.mark.parametrize("device", [H100, CPU])
@pytest.mark.parametrize("kind", ["matmul", "attention", "memory"])
def test_cost_grows_with_flops_and_bytes_and_broadcasts(device, kind) -> None:
    sizes = np.array([0.0, 1e3, 1e6, 1e9, 1e12])
    seconds = operator_seconds(device, flops=sizes[:, None], bytes_moved=sizes[None], dtype="float32", kind=kind)
    assert seconds.shape == (5, 5)
    assert np.all(np.diff(seconds, axis=0) >= 0)
    assert np.all(np.diff(seconds, axis=1) >= 0)
    curves = device.curves
    is_curve = curves is not None and kind == "memory"
    launch = curves.memory["elementwise"].launch_seconds if is_curve else device.launch_seconds
    assert seconds[0, 0] == launch


def test_an_operator_without_a_kernel_of_its_own_costs_no_launch() -> None:
    seconds = operator_seconds(CPU, flops=0, bytes_moved=[0, 0], dtype="float32", kind="memory", kernels=[0, 2])
    assert list(seconds) == [0, 2 * CPU.launch_seconds]


def test_a_dtype_without_a_rate_is_priced_by_its_nearest() -> None:
    assert matmul_flops_per_second(H100, "float16") == matmul_flops_per_second(H100, "bfloat16")
    assert matmul_flops_per_second(CPU, "bfloat16") == matmul_flops_per_second(CPU, "float32")
    assert matmul_flops_per_second(CPU, "float64") == matmul_flops_per_second(CPU, "float32") / 2


def test_a_device_without_rates_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="bfloat16"):
        matmul_flops_per_second(replace(CPU, flops_per_second={}), "bfloat16")


def test_a_copy_reads_and_writes_and_a_transposing_one_takes_longer() -> None:
    plain, transposing = copy_seconds(H100, [0, 1e9]), copy_seconds(H100, [0, 1e9], transposing=True)
    assert plain[0] == transposing[0] == 0
    assert plain[1] == pytest.approx(H100.launch_seconds + 2e9 / H100.memory_bytes_per_second)
    assert transposing[1] > plain[1]


def test_gelu_is_bound_by_arithmetic_on_a_cpu_and_by_memory_on_a_gpu() -> None:
    n = 2**20

    def seconds(device, operator: str) -> float:
        flops = n * element_flops(device, operator)
        return float(operator_seconds(device, flops=flops, bytes_moved=8 * n, dtype="float32", kind="memory"))

    assert seconds(CPU, "gelu") == pytest.approx(0.49e-9 * n, rel=0.1)  # measured: 0.489 ns per element
    assert seconds(CPU, "gelu") > 2 * seconds(CPU, "add")
    assert seconds(H100, "gelu") == seconds(H100, "add")


@pytest.mark.parametrize(("device", "slowdown"), [(H100, 1.5), (CPU, 5.0)])
def test_a_copy_that_changes_the_innermost_dim_moves_its_bytes_more_slowly(device, slowdown) -> None:
    straight, transposing = (copy_seconds(device, 1e9, transposing=flag) for flag in (False, True))
    assert straight - device.launch_seconds == pytest.approx(2e9 / device.memory_bytes_per_second)
    assert transposing - device.launch_seconds == pytest.approx(slowdown * 2e9 / device.memory_bytes_per_second)
    assert copy_seconds(device, 0.0, transposing=True) == 0.0


def test_an_older_attention_kernel_takes_longer_and_products_as_long() -> None:
    attention = AttentionSizes(
        batch=2,
        heads=16,
        queries_per_key=1,
        queries=4096,
        keys=4096,
        qk_dim=128,
        v_dim=128,
        causal=True,
        backward=False,
    )

    def seconds(sizes: AttentionSizes | ProductSizes, kernel: AttentionKernel) -> float:
        found = operator_seconds(H100, flops=0, bytes_moved=0, dtype="bfloat16", sizes=sizes, attention=kernel)
        return float(found)

    assert H100.curves is not None
    rates = [attention_speed(kernel, H100.curves) for kernel in ("flash1", "flash2")]
    assert rates[0] < rates[1]
    assert seconds(attention, "flash1") / seconds(attention, "flash2") == pytest.approx(rates[1] / rates[0])
    product = ProductSizes(m=4096, n=4096, k=4096)
    assert seconds(product, "flash1") == seconds(product, "flash2")


def mlp_seconds(operator: str, sizes: MlpSizes, device=H100) -> float:
    return float(operator_seconds(device, flops=0, bytes_moved=0, dtype="bfloat16", operator=operator, sizes=sizes))


@pytest.mark.parametrize("device", [H100, CPU])
def test_an_mlp_in_tiles_costs_its_products_and_those_of_forward_again(device) -> None:
    """Gated, with 8,192 rows: backward has 8 products where forward has 3; adding up over two tiles is little."""
    sizes = MlpSizes(rows=8192, hidden=14336, width=4096, out=4096, inputs=2)
    product = operator_seconds(
        device, flops=2 * 8192 * 14336 * 4096, bytes_moved=0, dtype="bfloat16", operator="mm",
        sizes=ProductSizes(m=8192, n=14336, k=4096),
    )  # fmt: skip
    forward, backward = (mlp_seconds(name, sizes, device) for name in ("tiled_mlp", "tiled_mlp_backward"))
    assert 3 * product < forward < 3.5 * product
    assert 8 * product < backward < 10.5 * product
    halves = [mlp_seconds("tiled_mlp_backward", replace(sizes, rows=rows), device) for rows in (4096, 8192)]
    added = 2 * 3 * 10 * 14336 * 4096 / device.memory_bytes_per_second  # bytes of three weights a tile
    assert halves[1] - 2 * halves[0] == pytest.approx(added, rel=0.3), "one tile adds nothing up"


def test_sizes_of_an_mlp_are_read_whichever_way_its_weights_lie() -> None:
    x, grad, into, turned, down = (100, 8), (100, 6), (20, 8), (8, 20), (6, 20)
    plain = MlpSizes(rows=100, hidden=20, width=8, out=6, inputs=1)
    for name, operands, inputs in (
        ("tiled_mlp", [x, into, down], 1),
        ("tiled_mlp", [x, into, (20,), down], 1),
        ("tiled_mlp", [x, turned, (20, 6)], 1),
        ("tiled_mlp", [x, into, into, down], 2),
        ("tiled_mlp_backward", [grad, x, turned, turned, (20,), (20,), (20, 6)], 2),
    ):
        assert sizes_of(name, operands, x, whole(len(operands))) == replace(plain, inputs=inputs)
