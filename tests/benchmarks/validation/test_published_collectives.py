"""Published collectives: hardware read from text, one answer in every column, and what was measured nearby."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autopar.cost_models.nccl import ring_rate
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import preset_names
from autopar.hardware.group_topology import GroupTopology
from benchmarks.validation.collective_machines import read_machine
from benchmarks.validation.collective_profiles import nominal
from benchmarks.validation.collectives import Question, bus_factor, cluster_of, naive, predict, read_bytes
from benchmarks.validation.fit_collectives import STARTS, Sweep, Target, fit, log_errors
from benchmarks.validation.schemas import schema_named
from benchmarks.validation.token_exchanges import gpu_initiated
from benchmarks.validation.token_routes import Leg, copies

SWEEP, VIDUR, MI250 = (schema_named(f"coll_{name}") for name in ("nccl_tests", "vidur_network", "nnscaler_mi250"))
EXCHANGE, SIMUMAX = schema_named("coll_deepep"), schema_named("coll_simumax_fits")
GALVATRON = schema_named("coll_galvatron_bandwidth_summary")


@pytest.mark.parametrize(
    ("text", "device", "intra", "network", "gigabits"),
    [
        ("2x p4de.24xlarge (A100-80, EFA 400Gbps/node)", "A100-80", "NVSwitch3", "EFA", 400),
        ("2x p5.48xlarge (H100, EFA 3200Gbps/node)", "H100-SXM", "NVSwitch4", "EFA", 3200),
        ("2 p5 nodes", "H100-SXM", "NVSwitch4", "EFA", 3200),
        ("8x H200 NVLink (p5en)", "H200-SXM", "NVSwitch4", "EFA", 3200),
        ("32xB200 4 nodes (P6-B200, EFAv4 50GB/s per GPU)", "B200-SXM", "NVSwitch5", "EFA", 3200),
        ("2 nodes x 8 A100-SXM4-80, 4x HDR CX6 per node", "A100-80", "NVSwitch3", "InfiniBand", 800),
        ("16x H100, 8x NDR per node", "H100-SXM", "NVSwitch4", "InfiniBand", 3200),
        ("2x8 A100 RoCE 1600G", "A100-80", "NVSwitch3", "InfiniBand", 1600),
        ("32 nodes x 8 A100, 8x200G IB", "A100-80", "NVSwitch3", "InfiniBand", 1600),
        ("H100 NVSwitch nodes, 400Gb/GPU", "H100-SXM", "NVSwitch4", "InfiniBand", 3200),
        ("H800 NVLink~160GB/s + CX7 400Gb/s", "H800-SXM", "NVSwitch4-H800", "InfiniBand", 3200),
        ("V100, 1 GPU per node, 10 Gb/s Ethernet", "V100-SXM2", "NVLink2", "Ethernet", 10),
        ("8x A100-SXM4-40GB", "A100-40", "NVSwitch3", "InfiniBand", None),
        ("8x MI300X xGMI", "MI300X", "xGMI", "InfiniBand", None),
        ("GB200 NVL72", "GB200", "NVSwitch5", "InfiniBand", None),
        ("a100_pairwise_nvlink", "A100-80", "NVLink3-pairs", "InfiniBand", None),
        ("a100_pcie", "A100-PCIE-80", "PCIe4", "Ethernet", None),
        ("mi250_node", "MI300X", "xGMI-MI250", "InfiniBand", None),
    ],
)
def test_hardware_is_read_from_text(text, device, intra, network, gigabits) -> None:
    machine = read_machine(text)
    assert (machine.device, machine.intra.name, machine.network) == (device, intra, network)
    rate = machine.node_bytes_per_second
    assert rate == (None if gigabits is None else pytest.approx(gigabits * 1e9 / 8))


def test_a_text_without_a_known_gpu_is_an_error_that_holds_it() -> None:
    with pytest.raises(ConfigurationError, match="four abaci"):
        read_machine("four abaci")


def test_a_sweep_forced_to_rings_has_no_multicast() -> None:
    assert read_machine("8x H100 NVSwitch, NVLS").intra.traits.multicast_fraction > 0
    assert read_machine("8x H100 NVSwitch, Ring").intra.traits.multicast_fraction == 0


def test_fewer_ranks_than_devices_have_their_share_of_the_nics() -> None:
    machine = read_machine("2x p4de (EFA 400Gbps/node)")
    whole, part = (machine.cluster(ranks=ranks, nodes=2).inter_link for ranks in (16, 8))
    assert whole.bytes_per_second == pytest.approx(part.bytes_per_second)
    shared = machine.cluster(ranks=8, nodes=2, whole_nodes=True)
    assert shared.devices_per_node == 8


def row(**fields: object) -> dict[str, str]:
    defaults = {"hw": "8x A100", "collective": "all_reduce", "n_ranks": 8, "n_nodes": 1, "msg_bytes": 2**28}
    return {name: str(value) for name, value in {**defaults, **fields}.items()}


def test_every_column_is_a_view_of_one_time() -> None:
    (predicted,) = predict([row()], SWEEP, "t0")
    assert set(predicted.values) == set(SWEEP.measured["collective"])
    seconds = float(predicted.values["time_us"]) * 1e-6
    assert predicted.values["algbw_GBps"] == pytest.approx(2**28 / seconds * 1e-9)
    assert predicted.values["busbw_GBps"] == pytest.approx(2**28 / seconds * 1e-9 * bus_factor("all_reduce", 8))
    assert predicted.values["time_us_inplace"] == predicted.values["time_us"]


def test_a_bandwidth_without_a_size_is_an_asymptote_without_a_time() -> None:
    assert [read_bytes(size) for size in ("large", "peak of sweep", ">=32MB", "0", "16 MiB")] == [
        None, None, None, 0.0, 16 * 2**20,
    ]  # fmt: skip
    (predicted,) = predict([row(msg_bytes="large")], SWEEP, "t0")
    assert "time_us" not in predicted.values
    assert 200 < float(predicted.values["busbw_GBps"]) < 250


@pytest.mark.parametrize("tier", ["t0", "t1", "physics"])
def test_what_cannot_be_predicted_has_a_reason(tier) -> None:
    rows = [
        row(hw="four abaci"),
        row(collective="gossip"),
        row(n_ranks=1),
        row(n_ranks="many"),
        row(hw="8x A100", n_ranks=16, n_nodes=2),
    ]
    predictions = predict(rows, SWEEP, tier)
    assert [predicted.values for predicted in predictions] == [{}] * 5
    reasons = [predicted.reason for predicted in predictions]
    for reason, word in zip(reasons, ("abaci", "gossip", "1 ranks", "many", "names no network"), strict=True):
        assert word in reason


# microseconds out of nccl-tests sweeps; (VIA-Research/vTrain trace, awsome-distributed-training, nccl-tests issue 152)
@pytest.mark.parametrize(
    ("fields", "microseconds"),
    [
        ({"hw": "a100", "n_ranks": 4, "msg_bytes": 2**22}, 77.32),
        ({"hw": "a100", "n_ranks": 4, "msg_bytes": 2**30}, 7259.4),
        ({"hw": "v100", "n_ranks": 8, "msg_bytes": 12 * 2**20}, 300.5),
        ({"hw": "v100", "n_ranks": 8, "msg_bytes": 2**24}, 273.8),  # less than for 12 MiB: LL128 is left behind
        ({"hw": "v100", "n_ranks": 2, "msg_bytes": 2**20}, 70.14),
        ({"hw": "2x p4de (A100-80, EFA 400Gbps/node)", "n_ranks": 16, "n_nodes": 2, "msg_bytes": 2**22}, 533.9),
        ({"hw": "2x8 A100, 4x HDR per node", "n_ranks": 16, "n_nodes": 2, "msg_bytes": 2**30}, 22490),
    ],
)
def test_times_nobody_fitted_one_by_one_are_met_within_15_percent(fields, microseconds) -> None:
    for tier in ("t0", "t1"):
        (predicted,) = predict([row(**fields)], SWEEP, tier)
        assert predicted.values["time_us"] == pytest.approx(microseconds, rel=0.15)


def test_the_calibrated_tier_knows_the_machine_and_the_others_do_not() -> None:
    across = [row(hw="a100_dgx", n_ranks=2, devices_per_node=1, msg_bytes=67108864)]
    (refused,), (predicted,) = predict(across, VIDUR, "t0"), predict(across, VIDUR, "t1")
    assert "names no network" in refused.reason
    assert predicted.values["time_ms_median_over_ranks"] == pytest.approx(11.439, rel=0.05)
    unnamed = [
        {"metric": "allreduce_busbw_GBps", "group_size": "4", "consecutive": "1", "nodes": "1", "gpus_per_node": "8"}
    ]
    assert predict(unnamed, GALVATRON, "t0")[0].reason
    assert predict(unnamed, GALVATRON, "t1")[0].values["value"] == pytest.approx(159.1, rel=0.05)


def test_lists_gathered_on_mi250_cost_their_copies_for_any_number_of_dies() -> None:
    rows = [
        {"hw": "mi250_node", "n_ranks": str(ranks), "n_nodes": "1", "collective": "all_gather", "size_mb": "256"}
        for ranks in (2, 4, 8)
    ]
    two, four, eight = (float(predicted.values["time_us"]) for predicted in predict(rows, MI250, "t1"))
    assert two == pytest.approx(2486.8, rel=0.12)
    assert eight == pytest.approx(5009.7, rel=0.12)
    assert two < four < eight


def exchange(lib: str, hw: str, ep: int, op: str, tokens: int, bottleneck: str) -> dict[str, str]:
    return {
        "lib": lib, "hw": hw, "ep": str(ep), "op": op, "tokens_per_rank": str(tokens), "hidden": "7168", "topk": "8",
        "bottleneck": bottleneck,
    }  # fmt: skip


H800 = "H800 NVLink~160GB/s + CX7 400Gb/s"


def test_dispatch_and_combine_cost_what_the_planner_asks_for_an_all_to_all() -> None:
    # GB/s and us: DeepEP docs/legacy.md @dd758ca, README @dd758ca, its measurement on AWS p5en
    rows = [
        (exchange("DeepEP v1 normal", H800, 8, "dispatch_fp8", 4096, "NVLink"), 153, None),
        (exchange("DeepEP v1 normal", H800, 8, "combine_bf16", 4096, "NVLink"), 158, None),
        (exchange("DeepEP v1 normal", H800, 32, "dispatch_fp8", 4096, "RDMA"), 58, None),
        (exchange("DeepEP v1 normal", H800, 32, "combine_bf16", 4096, "RDMA"), 57, None),
        (exchange("DeepEP v1 low-latency", "H800 CX7 400Gb/s", 8, "dispatch_fp8", 128, "RDMA"), 98, 77),
        (exchange("DeepEP v1 low-latency", "H800 CX7 400Gb/s", 32, "dispatch_fp8", 128, "RDMA"), 48, 155),
        (exchange("DeepEP v1 low-latency", "H800 CX7 400Gb/s", 32, "combine_bf16", 128, "RDMA"), 53, 273),
        (exchange("DeepEP v1 low-latency", "H800 CX7 400Gb/s", 128, "dispatch_fp8", 128, "RDMA"), 39, 192),
        (exchange("DeepEP v1 low-latency", "H800 CX7 400Gb/s", 128, "combine_bf16", 128, "RDMA"), 39, 369),
        (exchange("DeepEP v2 (24 SMs)", "SM100", 8, "dispatch_fp8", 8192, "NVLink"), 643, None),
        (exchange("DeepEP on AWS P5en", "8x H200 NVLink (p5en)", 8, "dispatch_bf16", 4096, "NVLink"), 331.77, 936.5),
    ]
    for row_, rate, microseconds in rows:
        (predicted,) = predict([row_], EXCHANGE, "t0")
        assert float(predicted.values["bottleneck_GBps"]) == pytest.approx(rate, rel=0.15)
        if microseconds is not None:
            assert float(predicted.values["latency_us"]) == pytest.approx(microseconds, rel=0.15)


def test_kernels_that_post_their_own_messages_wait_for_no_host_and_send_as_much() -> None:
    topology = GroupTopology(ranks=128, nodes=16, ranks_per_node=8, groups_per_node=1)
    cluster = Cluster.parse("16x8 H800")
    small, mid, large = (
        [leg.seconds(fabric) for fabric in (cluster, gpu_initiated(leg, cluster))]
        for leg in (Leg(nbytes=nbytes, topology=topology) for nbytes in (1.0, 1e8, 1e9))
    )
    assert small[1] < 0.5 * small[0]
    assert mid[0] - mid[1] == pytest.approx(large[0] - large[1])


def test_rates_are_of_the_bytes_that_a_row_counts() -> None:
    # of a token that 32 ranks of 4 nodes take NVLink carries 7.3 copies in the time in which the NICs carry 3.6
    one, other = (
        float(predict([exchange("DeepEP v1 normal", H800, 32, "combine_bf16", 4096, link)], EXCHANGE, "t0")[0].values[
            "bottleneck_GBps"
        ])
        for link in ("NVLink", "RDMA")
    )  # fmt: skip
    assert one / other == pytest.approx(copies(32, 256, 8) / copies(4, 256, 8))


def test_a_token_goes_to_four_nodes_at_most_where_the_published_routing_says_so() -> None:
    def microseconds(lib: str) -> float:
        row_ = exchange(lib, H800, 128, "combine_bf16", 4096, "RDMA")
        return float(predict([row_], EXCHANGE, "t0")[0].values["latency_us"])

    assert microseconds("DeepEP v2") / microseconds("DeepEP v1 normal") == pytest.approx(
        copies(16, 256, 8) / copies(16, 256, 8, 4), rel=0.01
    )


def test_efficiencies_of_another_simulator_are_those_of_our_links() -> None:
    fields = {"system": "a100_pcie", "link_gbps": "30", "link_latency_us": "10", "op": "all_gather"}
    near, far = predict(
        [{**fields, "network": "intra_node_pcie_4x"}, {**fields, "network": "inter_node"}], SIMUMAX, "t0"
    )
    assert near.values["fitted_efficiency"] == pytest.approx(0.6915, rel=0.05)
    assert "nobody fitted" in far.reason


def test_the_naive_baseline_is_the_bus_formula_at_the_vendors_rate() -> None:
    (predicted,) = naive([row()], SWEEP)
    assert predicted.values["time_us"] == pytest.approx(2**28 * 1.75 / 300e9 * 1e6)
    (across,) = naive([row(hw="A100, 8x200G", n_ranks=16, n_nodes=2)], SWEEP)
    assert across.values["time_us"] == pytest.approx(2**28 * 15 / 8 / 200e9 * 1e6)


def test_a_fit_finds_the_numbers_that_made_the_sweep() -> None:
    question = Question(hardware="8x A100", kind="all_reduce", nbytes=0.0, ranks=8, nodes=1)
    cluster, _ = cluster_of(question, "t0")
    target = Target(numbers=("startup_seconds", "bytes_per_second"), takes=lambda sweep: True)
    truth = {"startup_seconds": 5e-5, "bytes_per_second": 2e11}
    blank = Sweep(
        machine="8x A100", kind="all_reduce", topology=question.topology, cluster=cluster,
        nbytes=2.0 ** np.arange(12, 32), seconds=np.ones(20),
    )  # fmt: skip
    ((_, logarithms),) = log_errors([blank], truth, network=False)
    sweep = dataclasses.replace(blank, seconds=np.exp(logarithms))
    found = fit(target, [sweep])
    assert found == pytest.approx(truth, rel=0.02)
    assert STARTS["startup_seconds"] != truth["startup_seconds"]


@pytest.mark.parametrize("name", sorted({*preset_names()} - {"CPU", "CPU-node"}))
def test_every_preset_has_a_nominal_rate_at_least_as_high_as_its_rings(name) -> None:
    cluster = Cluster.parse(f"1x8 {name}")
    machine = dataclasses.replace(read_machine("8x A100"), intra=cluster.intra_link)
    assert nominal(machine, 8, 1).intra_link.bytes_per_second >= ring_rate(cluster.intra_link, 8)
