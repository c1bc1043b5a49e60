"""The pure parts of the emulated cluster: networks, names, commands, counters, shares of cores."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from autopar.errors import AutoparError, ConfigurationError
from benchmarks.netlab import cores, names
from benchmarks.netlab.__main__ import changed
from benchmarks.netlab.counters import FILE_BYTES, new_counters, read_counters
from benchmarks.netlab.presets import MAX_NODES, PRESETS, Network
from benchmarks.netlab.shaping import node_commands, rank_command, rank_environment, switch_command

NO_PROCESS = 2**22 + 1
"""Above the largest process id that Linux gives."""


def test_presets_differ_in_name() -> None:
    assert len({network.name for network in PRESETS.values()}) == len(PRESETS)
    assert PRESETS["two-by-two"].name == "2x2-200mbit-200us-0.3cores"
    assert PRESETS["slow-node"].node_mbit == (200.0, 200.0, 200.0, 50.0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"nodes": 17}, "17 nodes"),
        ({"ranks_per_node": 0}, "x 0 ranks"),
        ({"mbit": 0.0}, "0 Mbit/s of node 0"),
        ({"mbit": 1e5}, "at most 5000"),
        ({"slow_nodes": {4: 10.0}}, "no node 4"),
        ({"cores_per_rank": 0.0}, "0.0 cores"),
        ({"latency_us": -1.0}, "-1.0 us"),
    ],
)
def test_impossible_networks_are_refused(wrong: dict[str, object], says: str) -> None:
    numbers = {"nodes": 4, "ranks_per_node": 1, "mbit": 100.0, "latency_us": 100.0, **wrong}
    with pytest.raises(ConfigurationError, match=says):
        Network(**numbers)  # type: ignore[arg-type]


def test_a_preset_with_other_numbers() -> None:
    network = changed(PRESETS["flat-200mbit"], {"mbit": 100.0, "cores_per_rank": 0, "nodes": None})
    assert (network.nodes, network.mbit, network.cores_per_rank) == (4, 100.0, None)
    assert network.name == "4x1-100mbit-200us"


def test_only_what_a_lab_of_a_gone_process_made_is_left_over() -> None:
    lab, running = names.lab_name(NO_PROCESS, 0), names.lab_name(os.getpid(), 1)
    gone = [names.node_name(lab, 0), names.rank_name(lab, 3)]
    kept = [names.node_name(running, 0), "default", "autopar-netlab", f"my-{gone[0]}", f"{gone[0]}-mine"]
    assert names.leftovers([*kept, *gone]) == gone


def test_every_node_is_shaped_at_its_own_rate() -> None:
    network = PRESETS["slow-node"]
    command = switch_command(Path("/switch"), Path("/counters"), network, ["a", "b", "c", "d"], 60.0)
    assert command[6:] == ["/switch", "/counters", "200", "60", "a", "200", "b", "200", "c", "200", "d", "50"]


def test_nodes_have_addresses_of_their_own() -> None:
    lines = [next(line for line in node_commands(node) if "address" in line) for node in range(4)]
    assert [line.split()[2] for line in lines] == [f"10.78.0.{node + 1}/24" for node in range(4)]


def test_ranks_get_what_torchrun_gives() -> None:
    network = PRESETS["two-by-two"]
    found = [rank_environment(network, rank, 29501) for rank in range(4)]
    assert [(e["RANK"], e["LOCAL_RANK"], e["GROUP_RANK"]) for e in found] == [
        ("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"),
    ]  # fmt: skip
    assert {(e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"], e["MASTER_ADDR"]) for e in found} == {("4", "2", "10.78.0.1")}


def test_ranks_end_with_the_lab() -> None:
    assert rank_command("node", ["a", "b"])[:3] == ["setpriv", "--pdeathsig", "KILL"]
    assert rank_command("node", ["a", "b"])[-3:] == ["node", "a", "b"]


def test_counters_are_read_by_source_and_target(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    new_counters(path)
    before = read_counters(path, 4)
    table = np.zeros((MAX_NODES, MAX_NODES, 3), np.int64)
    table[1, 3] = 1052, 1000, 2
    path.write_bytes(table.tobytes())
    carried = read_counters(path, 4) - before
    assert path.stat().st_size == FILE_BYTES
    assert carried.packets[1, 3] == 1052 == carried.packets.sum()
    assert carried.payload[1, 3] == 1000 == carried.payload.sum()
    assert carried.dropped[1, 3] == 2 == carried.dropped.sum()


def test_cores_of_both_kinds_of_cgroup(tmp_path: Path) -> None:
    old, new, neither = tmp_path / "v1", tmp_path / "v2", tmp_path / "none"
    for folder in (old / "cpu", new, neither):
        folder.mkdir(parents=True)
    (old / "cpu" / "cgroup.procs").touch()
    (new / "cgroup.subtree_control").write_text("cpu memory")
    assert cores.limits(0.5, cores.cores_directory(old)) == {
        "cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "5000", "cpu.shares": "16384",
    }  # fmt: skip
    assert cores.limits(0.5, cores.cores_directory(new)) == {"cpu.max": "5000 10000", "cpu.weight": "1600"}
    with pytest.raises(AutoparError, match="no cpu controller"):
        cores.cores_directory(neither)


def test_a_group_is_joined_before_the_command_starts(tmp_path: Path) -> None:
    group = cores.make_group("group", 0.5, tmp_path)
    assert (group / "cpu.cfs_quota_us").read_text() == "5000"
    assert cores.join_command(group, ["echo", "a b"])[2:] == [
        f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", "echo", "a b",
    ]  # fmt: skip
