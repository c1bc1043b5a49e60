import dataclasses
from pathlib import Path

import pytest

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster, MixedCluster, _detect_cuda, machine_name, measured_cluster_path
from autopar.hardware.devices import preset_names
from autopar.hardware.group_topology import GroupTopology
from autopar.hardware.local_gpus import LocalGPUs


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "device"),
    [
        ("2x8 H100-SXM", 2, 8, "H100-SXM"),
        ("1x8 H100-SXM", 1, 8, "H100-SXM"),
        ("8 h100", 1, 8, "H100-SXM"),
        ("16 A100", 2, 8, "A100-80"),
        ("4x4 A10G", 4, 4, "A10G"),
        ("32x8 A100-80 @ 800Gb", 32, 8, "A100-80"),
        ("4 cpu", 1, 4, "CPU"),
        ("1x4 CPU", 1, 4, "CPU"),
        ("2 x 8 AWS-p4de", 2, 8, "A100-80"),
        ("1x8 RTX4090@25 Gbit/s", 1, 8, "RTX4090"),
    ],
)
def test_parse_reads_nodes_devices_and_name(text: str, nodes: int, devices: int, device: str) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.device.name) == (nodes, devices, device)
    assert cluster.num_devices == nodes * devices
    assert cluster.collective_backend == ("gloo" if device == "CPU" else "nccl")
    assert cluster.profile.startswith("preset")


def test_the_rate_after_the_at_sign_is_of_one_node() -> None:
    slow, fast = Cluster.parse("2x8 A100-80 @ 100Gb"), Cluster.parse("2x8 A100-80 @ 800Gb")
    assert fast.inter_link.bytes_per_second == pytest.approx(8 * slow.inter_link.bytes_per_second)
    assert 0.8 * 12.5e9 < fast.inter_link.bytes_per_second < 12.5e9
    assert Cluster.parse("2x8 A100 @ 100GB/s").inter_link == fast.inter_link


def test_a_single_nic_is_shared_by_all_devices_of_the_node() -> None:
    one, four = (Cluster.parse(f"2x{d} A10G").inter_link.bytes_per_second for d in (1, 4))
    assert one == pytest.approx(4 * four)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_parses_and_names_the_source_of_every_number(name: str) -> None:
    cluster = Cluster.parse(f"2x4 {name}")
    assert all(cluster.device.sources.values())
    assert cluster.intra_link.source
    assert cluster.inter_link.source
    assert all(f"flops_per_second[{dtype}]" in cluster.device.sources for dtype in cluster.device.flops_per_second)
    assert cluster.intra_link.bytes_per_second > cluster.inter_link.bytes_per_second > 0
    assert all(fit.source for fit in cluster.intra_link.fits)


def test_an_unknown_name_is_an_error_with_the_nearest_name_and_all_presets() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'H100-SXM'") as error:
        Cluster.parse("8 H100-SMX")
    assert all(name in str(error.value) for name in preset_names())


@pytest.mark.parametrize("text", ["", "H100", "8xH100", "2x8x4 H100", "0 cpu", "9 H100", "8 H100 @ fast"])
def test_malformed_text_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError):
        Cluster.parse(text)


def test_a_saved_cluster_reads_back_equal(tmp_path) -> None:
    cluster = Cluster.parse("2x8 H100-SXM")
    cluster.save(tmp_path / "cluster.json")
    again = Cluster.from_file(tmp_path / "cluster.json")
    assert again == cluster
    assert again.fingerprint == cluster.fingerprint
    assert dataclasses.replace(cluster, num_nodes=3).fingerprint != cluster.fingerprint


def test_a_file_that_is_no_cluster_is_an_error(tmp_path) -> None:
    (tmp_path / "cluster.json").write_text('{"name": 3}')
    for name in ("cluster.json", "missing.json"):
        with pytest.raises(ConfigurationError, match=name):
            Cluster.from_file(tmp_path / name)


def test_detect_prefers_the_measured_cluster_and_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    preset = Cluster.detect(world_size=3)
    if preset.device.kind == "cuda":
        pytest.skip("this machine has a GPU")
    assert preset.profile.startswith("preset")
    assert preset.num_devices == 3
    measured = dataclasses.replace(preset, profile=f"measured: {machine_name()}")
    measured.save(measured_cluster_path(3))
    assert Cluster.detect(world_size=3) == measured
    assert Cluster.detect(world_size=2).profile.startswith("preset")


def test_several_kinds_are_joined_by_plus(tmp_path: Path) -> None:
    cluster = Cluster.parse("1x8 H100-SXM + 2x8 A100-80 @ 100Gb")
    assert isinstance(cluster, MixedCluster)
    assert cluster.parts == (Cluster.parse("1x8 H100-SXM"), Cluster.parse("2x8 A100-80 @ 100Gb"))
    assert (cluster.num_devices, cluster.num_nodes, cluster.first_ranks) == (24, 3, (0, 8))
    assert cluster.inter_link == cluster.parts[1].inter_link, "the slower network lies between them"
    assert Cluster.parse(cluster.name) == cluster
    cluster.save(tmp_path / "mixed.json")
    again = Cluster.from_file(tmp_path / "mixed.json")
    assert again == cluster
    assert again.fingerprint == cluster.fingerprint != cluster.parts[0].fingerprint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8 H100-SXM +", 'expected "<nodes>x<devices> <type>'),
        ("8 H100-SXM + 8 A100-90", "did you mean 'A100-80'"),
        ("8 H100-SXM + 0 A100", "has no device"),
        ("8 H100-SXM + 4 cpu", "mixes devices of gloo and nccl"),
    ],
)
def test_parts_that_cannot_be_meant_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Cluster.parse(text)


def test_what_needs_equal_devices_refuses_several_kinds() -> None:
    cluster = Cluster.parse("8 H100-SXM + 8 A100-80")
    with pytest.raises(ConfigurationError, match=r"a mesh needs devices of one kind.*H100-SXM, A100-80"):
        GroupTopology.of(cluster, (2, 8), (1,))


def test_gpus_found_are_as_many_as_asked_for_else_as_the_job_has_else_as_the_node_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    gpus = LocalGPUs(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 1024**3, count=8)
    assert _detect_cuda(gpus, None).num_devices == 8
    assert _detect_cuda(gpus, 2).num_devices == 2
    monkeypatch.setenv("WORLD_SIZE", "16")
    found = _detect_cuda(gpus, None)
    assert (found.num_nodes, found.devices_per_node) == (2, 8)
    assert _detect_cuda(gpus, 4).num_devices == 4


@pytest.mark.parametrize(
    ("text", "meant"),
    [("2x8H100", "2x8 H100"), ("8xH100-SXM", "8 H100-SXM"), ("2x8-H100 @ 800Gb", "2x8 H100 @ 800Gb"),
     ("H100", "8 H100"), ("8 H10-SXM", "H100-SXM")],
)  # fmt: skip
def test_a_mistyped_cluster_says_what_may_be_meant(text: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=f"did you mean ['\"]{meant}['\"]\\?"):
        Cluster.parse(text)


@pytest.mark.parametrize("text", ["", "x", "eight", "2x8 H100-SXM @ 800"])
def test_nothing_is_guessed_where_nothing_is_near(text: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot read cluster") as refused:
        Cluster.parse(text)
    assert "did you mean" not in str(refused.value)
