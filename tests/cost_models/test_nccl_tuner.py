"""NCCL's tuner against outputs of NCCL's own (tables that meta-pytorch/autoparallel ships as "measured")."""

import dataclasses

import numpy as np
import pytest

from autopar.cost_models.nccl_tuner import Fabric, Group, tuner_lines, tuner_seconds, tuner_times

# 8 H100 behind NVSwitch: 18 channels of 20 GB/s; one H100 per node: 2 channels over NICs of 48 GB/s together
NODE = Fabric(generation="Hopper", channels=18, intra_GBps=20.0, inter_GBps=20.0)
NETWORK = Fabric(generation="Hopper", channels=2, intra_GBps=24.0, inter_GBps=24.0)
MEBIBYTES = [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
"""Of one rank's shard in all-gathers; of the buffer elsewhere."""

ORACLE_MS = {  # collective, nodes, ranks -> one row per size
    ("all_gather", 1, 8): "0.1138 0.1953 0.3584 0.6846 1.3371 2.642 5.2518 10.4714 20.9105 41.7888",
    ("all_gather", 8, 8): "0.7181 1.3297 2.5531 4.9998 9.8931 19.6798 39.2532 78.4001 156.694 313.281",
    ("all_gather", 16, 16): "1.5291 2.8398 5.4613 10.7042 21.1899 42.1614 84.1045 167.9904 335.763 671.3073",
    ("all_gather", 32, 32): "3.1512 5.86 11.2777 22.113 43.7835 87.1247 173.807 347.171 693.901 1387.36",
    ("all_reduce", 1, 8): "0.0628 0.0849 0.1292 0.2179 0.3822 0.7084 1.3609 2.6658 5.2756 10.4952",
    ("reduce_scatter", 1, 8): "0.0368 0.0495 0.0716 0.1138 0.1953 0.3584 0.6846 1.3371 2.642 5.2518",
    ("reduce_scatter", 8, 8): "0.1566 0.2397 0.4059 0.7181 1.3297 2.5531 4.9998 9.8931 19.6798 39.2532",
    ("reduce_scatter", 32, 32): "0.3608 0.4615 0.6455 1.0136 1.7497 3.1512 5.86 11.2777 22.113 43.7835",
}


def _oracle_rows():
    for (kind, nodes, ranks), row in ORACLE_MS.items():
        for mebibytes, text in zip(MEBIBYTES, row.split(), strict=True):
            yield kind, nodes, ranks, mebibytes * 2.0**20 * (ranks if kind == "all_gather" else 1), text


def _tolerance_us(text: str) -> float:
    """1 us, or half of the last of the six digits that the oracle prints."""
    return max(1.0, 0.5 * 10.0 ** (3 - (len(text.partition(".")[2]))))


def _misses(fabric_of_node: Fabric, fabric_of_network: Fabric) -> int:
    misses = 0
    for kind, nodes, ranks, nbytes, text in _oracle_rows():
        fabric = fabric_of_node if nodes == 1 else fabric_of_network
        predicted = float(tuner_seconds(kind, nbytes, Group(ranks=ranks, nodes=nodes), fabric)) * 1e6
        misses += abs(predicted - 1e3 * float(text)) > _tolerance_us(text)
    return misses


def test_the_tuner_equals_its_oracle() -> None:
    assert len(list(_oracle_rows())) == 80
    assert _misses(NODE, NETWORK) == 0


@pytest.mark.parametrize(
    "mutant",
    [
        {"channels": 19},
        {"intra_GBps": 20.1, "inter_GBps": 20.1},
        {"generation": "Ampere"},  # other ceilings of LL and of a channel of LL128
        {"ll128": False},
    ],
)
def test_the_oracle_notices_another_fabric(mutant) -> None:
    assert _misses(dataclasses.replace(NODE, **mutant), NETWORK) > 0


def test_one_rank_per_node_takes_the_latency_of_trees() -> None:
    alone = tuner_lines("all_gather", Group(ranks=8, nodes=8), NETWORK)
    pairs = tuner_lines("all_gather", Group(ranks=16, nodes=8), NETWORK)
    assert alone["Ring", "LL"][0] == pytest.approx(6.6 + 7 * 5.0)
    assert pairs["Ring", "LL"][0] == pytest.approx(6.6 + 8 * 1.0 + 7 * 2.7)


def test_protocols_change_with_the_size_from_low_latency_to_full_rate() -> None:
    times = tuner_times("all_reduce", np.array([1e3, 8e6, 1e9]), Group(ranks=8, nodes=1), NODE)
    taken = [min(times, key=lambda choice: times[choice][size]) for size in range(3)]
    assert taken == [("Ring", "LL"), ("Ring", "LL128"), ("Ring", "Simple")]


def test_multicast_needs_a_switch_and_trees_of_it_need_more_nodes() -> None:
    switch = dataclasses.replace(NODE, nvls_channels=16)
    one, two = Group(ranks=8, nodes=1), Group(ranks=16, nodes=2)
    assert ("NVLS", "Simple") in tuner_lines("all_reduce", one, switch)
    assert ("NVLS", "Simple") not in tuner_lines("all_reduce", one, NODE)
    assert ("NVLSTree", "Simple") in tuner_lines("all_reduce", two, switch)
    assert ("NVLSTree", "Simple") not in tuner_lines("all_gather", two, switch)
    # reduction in the switch: one pass over the link instead of two
    lines = tuner_lines("all_reduce", one, switch)
    assert 1.3 < lines["NVLS", "Simple"][1] / lines["Ring", "Simple"][1] < 1.5


def test_pat_is_logarithmic_in_nodes_and_needs_one_rank_on_each() -> None:
    fabric = dataclasses.replace(NETWORK, pat=True)
    latency, rate = tuner_lines("reduce_scatter", Group(ranks=16, nodes=16), fabric)["PAT", "Simple"]
    assert latency == pytest.approx(8 + 4 * 14 / 3.5 + 2.8 * 16)
    assert rate == pytest.approx(0.75 * 48)
    assert ("PAT", "Simple") not in tuner_lines("reduce_scatter", Group(ranks=16, nodes=8), fabric)


def test_a_network_that_reduces_beats_rings_of_many_nodes() -> None:
    group = Group(ranks=256, nodes=32)
    sharp = dataclasses.replace(NODE, collnet=True)
    assert tuner_seconds("all_reduce", 1e6, group, sharp) < tuner_seconds("all_reduce", 1e6, group, NODE)


def test_broadcast_streams_the_buffer_once_along_a_ring() -> None:
    one_ring = tuner_seconds("broadcast", 1e9, Group(ranks=8, nodes=1), NODE)
    assert one_ring == pytest.approx(3.4e-6 + 8.4e-6 + 1e9 / 360e9)
    other_rings = dataclasses.replace(NODE, same_channels=False)
    assert tuner_seconds("reduce", 1e9, Group(ranks=8, nodes=1), other_rings) > one_ring


def test_trees_lose_rate_in_the_middle_of_the_sizes() -> None:
    times = tuner_times("all_reduce", np.array([2.0**18, 2.0**28]), Group(ranks=32, nodes=4), NODE)
    latency, rate = tuner_lines("all_reduce", Group(ranks=32, nodes=4), NODE)["Tree", "Simple"]
    small, large = times["Tree", "Simple"] * 1e6 - latency
    assert small == pytest.approx(2.0**18 / (1e3 * rate) / 0.5)
    assert large == pytest.approx(2.0**28 / (1e3 * rate) / 0.9)
