"""Hosts of the presets: sources, sound rates, and what a file of an older version says of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster, MixedCluster, check_cluster
from autopar.hardware.devices import preset_names
from autopar.hardware.hosts import host_link, host_link_names

CPUS = ("CPU", "CPU-node")


@pytest.mark.parametrize("name", [name for name in preset_names() if name not in CPUS])
def test_every_node_of_gpus_has_a_host_that_names_the_source_of_every_number(name: str) -> None:
    host = Cluster.parse(f"1x4 {name}").host
    assert host is not None
    assert set(host.sources) == {"memory_bytes", "memory_bytes_per_second"}
    assert all(host.sources.values())
    assert host.link.source
    assert host.storage is None or host.storage.source


@pytest.mark.parametrize("name", CPUS)
def test_a_preset_of_processes_has_no_host_beside_them(name: str) -> None:
    assert Cluster.parse(f"1x4 {name}").host is None


@pytest.mark.parametrize("name", host_link_names())
def test_both_directions_together_are_faster_than_one_and_no_faster_than_two(name: str) -> None:
    link = host_link(name)
    rates = sorted((link.to_host_bytes_per_second, link.from_host_bytes_per_second))
    assert 0.9 * rates[1] < link.both_bytes_per_second <= sum(rates)


def test_generations_of_links_are_in_their_order_and_under_the_nominal_rate() -> None:
    nominal = {"PCIe3": 16e9, "PCIe4": 32e9, "PCIe5": 64e9, "PCIe6": 128e9, "NVLink-C2C": 450e9}
    for name, rate in nominal.items():
        link = host_link(name)
        assert 0.6 * rate < link.from_host_bytes_per_second < rate, name
        assert 0.6 * rate < link.to_host_bytes_per_second < rate, name


def test_devices_behind_one_switch_share_its_port_where_they_are_used() -> None:
    shared = [Cluster.parse(f"1x{devices} A100").host for devices in (1, 2, 8)]
    assert [host.link.devices_per_link for host in shared if host] == [1, 2, 2]
    assert Cluster.parse("8 H100").host.link.devices_per_link == 1  # type: ignore[union-attr]


def test_a_cluster_of_several_kinds_has_the_host_of_its_first_part_and_each_part_its_own() -> None:
    mixed = Cluster.parse("1x8 H100-SXM + 1x8 A100-80")
    assert isinstance(mixed, MixedCluster)
    assert mixed.host == mixed.parts[0].host != mixed.parts[1].host


def test_a_file_without_a_host_is_read_and_has_none(tmp_path: Path) -> None:
    cluster = Cluster.parse("8 H100")
    path = tmp_path / "cluster.json"
    cluster.save(path)
    assert Cluster.from_file(path) == cluster
    written = json.loads(path.read_text())
    del written["host"]
    path.write_text(json.dumps(written))
    assert Cluster.from_file(path) == replace(cluster, host=None)
    assert Cluster.from_file(path).fingerprint != cluster.fingerprint


def test_a_rate_that_no_link_has_is_an_error_that_names_it() -> None:
    cluster = Cluster.parse("8 H100")
    assert cluster.host is not None
    broken = replace(cluster.host, link=replace(cluster.host.link, to_host_bytes_per_second=0.0))
    with pytest.raises(ConfigurationError, match=r"host.link.to_host_bytes_per_second is 0.0: write a positive number"):
        check_cluster(replace(cluster, host=broken))
