"""The cluster a plan is made for: devices, the links between them, and who shares which link.

    Cluster.parse("2x8 H100-SXM")             # 2 nodes of 8 GPUs, priced by the shipped preset
    Cluster.parse("32x8 A100-80 @ 800Gb")     # network rate per node, per direction
    Cluster.parse("4 cpu")                    # 4 gloo processes on one machine
    Cluster.parse("1x8 H100-SXM + 2x8 A100-80")   # a `MixedCluster`: ranks 0 .. 7 and 8 .. 23, for pipelines
    Cluster.detect()                          # this machine, by its measured profile where there is one

Everything here is a value: no torch, no device, no process group (only `detect` looks at this machine). The
presets of devices and links come from `autopar.hardware.devices`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from autopar.errors import ConfigurationError
from autopar.files import cache_directory, decoded_json, file_content, write_atomically
from autopar.hardware.devices import (
    Device,
    Link,
    NodePreset,
    find_node,
    find_node_of_gpu,
    network_link,
    preset_device,
    preset_link,
    pricing_tier,
)
from autopar.hardware.hosts import Host, preset_host
from autopar.hardware.operator_profile import OperatorProfile, load_profile, operator_profile_path
from autopar.hardware.sound_numbers import check_numbers
from autopar.later import later

if TYPE_CHECKING:
    from autopar.hardware.local_gpus import LocalGPUs

__all__ = [
    "Cluster",
    "Device",
    "Link",
    "MixedCluster",
    "check_cluster",
    "machine_name",
    "measured_cluster_path",
    "nodes_of_job",
    "process_memory_bytes",
    "refuse_mixed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_nodes` equal nodes of `devices_per_node` devices; rank r sits in node r // devices_per_node."""

    name: str
    num_nodes: int
    devices_per_node: int
    device: Device
    intra_link: Link
    inter_link: Link
    collective_backend: Literal["nccl", "gloo"]
    profile: str
    """Which tier priced it: "preset: ..." or "measured: ..."."""
    overlap_slowdown: float = 1.0
    """How many times longer computation takes while a collective is on its way: on CPUs, moving and adding up bytes
    takes processor time. 1.0: nothing was measured."""
    collective_host_seconds: float = 0.0
    """What a collective of any size takes from the computation beside it, on CPUs. 0: nothing was measured."""
    host: Host | None = None
    """What stands beside the devices of every node; None: nothing may be kept there."""

    @property
    def num_devices(self) -> int:
        """Devices of the whole cluster."""
        return self.num_nodes * self.devices_per_node

    @property
    def fingerprint(self) -> str:
        """16 hex digits over every number of the cluster: part of each cache key, and stored in the plan."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read "[<nodes>x]<devices> <device or node type>[ @ <network rate of one node>]".

        Without "<nodes>x" the devices fill nodes of the type's usual size. Several of these, joined by "+", are a
        `MixedCluster`. Raises ConfigurationError for text of another form and for unknown names (with the nearest
        name and all presets).
        """
        if "+" in text:
            check_parts(text[:40], text.count("+") + 1)
            return MixedCluster.of([Cluster._parse_one(part) for part in text.split("+")])
        return Cluster._parse_one(text)

    @staticmethod
    def _parse_one(text: str) -> Cluster:
        match = _CLUSTER_TEXT.fullmatch(text.strip())
        if match is None:
            raise ConfigurationError(
                f'cannot read cluster {text!r}: expected "<nodes>x<devices> <type>[ @ <rate>Gb]", '
                'for example "2x8 H100-SXM", "32x8 A100-80 @ 800Gb" or "4 cpu"; several kinds are joined by "+"'
                f"{_meant(text)}"
            )
        node = find_node(match["name"])
        num_nodes, devices_per_node = _split_devices(text, match["nodes"], int(match["devices"]), node)
        if not num_nodes or not devices_per_node:
            raise ConfigurationError(f"cluster {text!r} has no device")
        rate = _bytes_per_second(match["rate"], match["unit"]) if match["rate"] else None
        cluster = _cluster_of_node(node, num_nodes, devices_per_node, rate)
        try:
            check_cluster(cluster)
        except ConfigurationError as error:
            raise ConfigurationError(f"cluster {text!r}: {error}") from error
        return cluster

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster that `save` wrote, with "parts" where it has several kinds of devices. Raises
        ConfigurationError where the content is not a cluster."""
        try:
            found = decoded_json(file_content(path, "the file"), "the file")
            is_mixed = isinstance(found, dict) and "parts" in found
            cluster: Cluster = msgspec.convert(found, type=MixedCluster if is_mixed else Cluster, str_keys=True)
            check_cluster(cluster)
        except (msgspec.ValidationError, ConfigurationError) as error:
            raise ConfigurationError(f"cannot read a cluster from {os.fspath(path)!r}: {error}") from error
        return cluster

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster as JSON, atomically."""
        write_atomically(path, msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=1))

    def with_operator_profile(self, profile: OperatorProfile) -> Cluster:
        """The cluster with kernels measured on one of its GPUs, which bend the curves that price operators, and with
        the host beside it, where that was measured, too.

        Raises ConfigurationError where the profile was measured on another type of GPU.
        """
        measured = find_node_of_gpu(profile.device).device
        if measured != self.device.name:
            raise ConfigurationError(
                f"profile {profile.name!r} was measured on {profile.device!r} (a {measured}), "
                f"the cluster {self.name!r} has {self.device.name}"
            )
        device = replace(self.device, profile=profile)
        links = self.profile.partition(";")[0]
        found = replace(self, device=device, profile=f"{links}; {pricing_tier(device)}")
        return found if profile.host is None else found._with_measured_host(profile.host)

    def _with_measured_host(self, host: Host) -> Cluster:
        """With a host that one process measured, and as many devices to a link as before."""
        shared = 1 if self.host is None else self.host.link.devices_per_link
        return replace(self, host=replace(host, link=replace(host.link, devices_per_link=shared)))

    @classmethod
    def detect(cls, world_size: int | None = None) -> Cluster:
        """Describe this machine: its GPUs by name, else its CPU by the cached measurement or the preset.

        `world_size` is the number of processes; by default $WORLD_SIZE, else all GPUs, else all cores.
        `profile` says which tier was taken; `autopar profile` makes the measurement.
        """
        gpus = local_gpus()
        if gpus is not None:
            return _detect_cuda(gpus, world_size)
        processes = world_size or int(os.environ.get("WORLD_SIZE", "0")) or os.cpu_count() or 1
        nodes = nodes_of_job(processes)
        measured = measured_cluster_path(processes, nodes)
        return cls.from_file(measured) if measured.exists() else _preset_cpu_cluster(processes, nodes)


local_gpus: Callable[[], LocalGPUs | None] = later("autopar.hardware.local_gpus", "local_gpus")

MOST_DEVICES = 1 << 20
"""Of a cluster: 64 times the largest one of the benchmarks, 16,384."""


MOST_PARTS = 16
"""Of a cluster with several kinds of devices: every pair of them is a link that planning looks at."""


def check_parts(name: str, count: int) -> None:
    """Raises ConfigurationError for more parts than are planned for."""
    if count > MOST_PARTS:
        raise ConfigurationError(
            f"cluster {name!r} has {count:,} parts, more than the {MOST_PARTS} kinds of devices that are planned for"
        )


def check_cluster(cluster: Cluster) -> None:
    """Raises ConfigurationError naming the entry, for numbers that no cluster has."""
    check_numbers(cluster)
    if cluster.num_devices > MOST_DEVICES:
        raise ConfigurationError(
            f"cluster {cluster.name!r} has {cluster.num_devices:,} devices, more than the {MOST_DEVICES:,} that are "
            "planned for"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCluster(Cluster):
    """Clusters of one kind of device each, side by side: the ranks of a part follow those of the part before it.

    `inter_link` is the link between parts, per device: the slowest network among them. The other fields of one device
    and one node are those of the first part, and `num_nodes` counts all nodes. What needs equal devices, such as a
    collective over all ranks, is refused: a model runs here as a pipeline, each stage inside one part.
    """

    parts: tuple[Cluster, ...]

    def __post_init__(self) -> None:
        if len(self.parts) < 2 or any(isinstance(part, MixedCluster) for part in self.parts):
            raise ConfigurationError(f"cluster {self.name!r} needs two or more parts, of one kind of device each")
        check_parts(self.name[:40], len(self.parts))
        backends = sorted({part.collective_backend for part in self.parts})
        if len(backends) > 1:
            raise ConfigurationError(
                f"cluster {self.name!r} mixes devices of {' and '.join(backends)}: one job has one backend, so plan "
                "for GPUs or for CPUs"
            )

    @classmethod
    def of(cls, parts: Sequence[Cluster]) -> MixedCluster:
        """The cluster of these parts. Raises ConfigurationError for fewer than two and for backends that differ."""
        first = parts[0]
        return cls(
            name=" + ".join(part.name for part in parts),
            num_nodes=sum(part.num_nodes for part in parts),
            devices_per_node=first.devices_per_node,
            device=first.device,
            intra_link=first.intra_link,
            inter_link=min((part.inter_link for part in parts), key=lambda link: link.bytes_per_second),
            collective_backend=first.collective_backend,
            profile=" + ".join(part.profile for part in parts),
            parts=tuple(parts),
            host=first.host,
        )

    @property
    def num_devices(self) -> int:
        """Devices of all parts."""
        return sum(part.num_devices for part in self.parts)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of every part."""
        sizes = [part.num_devices for part in self.parts]
        return tuple(sum(sizes[:index]) for index in range(len(sizes)))

    def with_operator_profile(self, profile: OperatorProfile) -> Cluster:
        """The cluster with kernels measured on a GPU of one of its parts.

        Raises ConfigurationError where no part has such GPUs.
        """
        measured = find_node_of_gpu(profile.device).device
        kinds = [part.device.name for part in self.parts]
        if measured not in kinds:
            raise ConfigurationError(
                f"profile {profile.name!r} was measured on {profile.device!r} (a {measured}), "
                f"the cluster {self.name!r} has {', '.join(kinds)}"
            )
        parts = [p.with_operator_profile(profile) if p.device.name == measured else p for p in self.parts]
        return replace(MixedCluster.of(parts), inter_link=self.inter_link)


def refuse_mixed(cluster: Cluster, what: str) -> None:
    """Raise ConfigurationError where the devices of a cluster are of several kinds, in words of what needs one."""
    if isinstance(cluster, MixedCluster):
        kinds = ", ".join(part.device.name for part in cluster.parts)
        raise ConfigurationError(f"{what} needs devices of one kind; {cluster.name!r} has {kinds}: ask for one part")


_CLUSTER_TEXT = re.compile(
    r"(?:(?P<nodes>\d{1,18})\s*x\s*)?(?P<devices>\d{1,18})\s+(?P<name>[^@]*[^@\s])"
    r"(?:\s*@\s*(?P<rate>\d{1,18}(?:\.\d{1,18})?)\s*(?P<unit>[GMgm](?:[bB]|bit|bps)(?:/s)?))?",
    re.ASCII,
)


_TYPE_WITHOUT_SPACE = re.compile(r"((?:\d{1,18}\s*x\s*)?\d{1,18})\s*[x-]?\s*([A-Za-z].*)", re.ASCII)


def _meant(text: str) -> str:
    """The end of an error: the description that a text without its space ("2x8H100"), or without a number of devices
    ("H100"), stands for; "" where it stands for none."""
    match = _TYPE_WITHOUT_SPACE.fullmatch(text.strip())
    name = match[2] if match else text
    try:
        node = find_node(name.partition("@")[0])
    except ConfigurationError:
        return ""
    meant = f"{match[1] if match else node.devices_per_node} {name.strip()}"
    return f'; did you mean "{meant}"?' if _CLUSTER_TEXT.fullmatch(meant) else ""


def _bytes_per_second(rate: str, unit: str) -> float:
    """Rate in bytes/s; "Gb", "Gbit" and "Gbps" count bits, "GB" counts bytes."""
    scale = 1e9 if unit[0] in "Gg" else 1e6
    return float(rate) * scale / (1.0 if unit[1] == "B" else 8.0)


def _split_devices(text: str, nodes: str | None, devices: int, node: NodePreset) -> tuple[int, int]:
    if nodes is not None:
        return int(nodes), devices
    if devices <= node.devices_per_node:
        return 1, devices
    if devices % node.devices_per_node:
        raise ConfigurationError(
            f"cluster {text!r}: {devices} devices do not fill nodes of {node.devices_per_node}; write <nodes>x<devices>"
        )
    return devices // node.devices_per_node, node.devices_per_node


def _cluster_of_node(node: NodePreset, num_nodes: int, devices_per_node: int, rate: float | None = None) -> Cluster:
    """`rate`: bytes/s of one node's network, per direction; None takes the NICs of the node type."""
    suffix = "" if rate is None else f" @ {rate * 8e-9:g}Gb"
    device = preset_device(node.device)
    return Cluster(
        name=f"{num_nodes}x{devices_per_node} {node.device}{suffix}",
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=device,
        intra_link=preset_link(node.intra_link),
        inter_link=network_link(node, devices_per_node, rate),
        collective_backend=node.collective_backend,
        profile=f"preset: {node.device}, {node.intra_link}, {node.network_link}; {pricing_tier(device)}",
        host=preset_host(node.host, devices_per_node),
    )


def machine_name() -> str:
    """A stable name of this machine's processor, for file names: "amd-epyc-2-cores"."""
    model = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpu_info.read_text(), re.MULTILINE)
        model = found[1] if found else model
    words = re.findall(r"[a-z0-9]+", model.lower())
    return "-".join([*words, str(os.cpu_count() or 1), "cores"])


def nodes_of_job(world_size: int) -> int:
    """Nodes of the job that torchrun has started with so many processes; 1 where there is none of that size."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    in_job = local and int(os.environ.get("WORLD_SIZE", "0")) == world_size and world_size % local == 0
    return world_size // local if in_job else 1


def measured_cluster_path(world_size: int, nodes: int = 1) -> Path:
    """Where the measured cluster of `world_size` processes on so many machines like this one is kept."""
    across = f"-on-{nodes}-nodes" if nodes > 1 else ""
    return cache_directory() / "clusters" / f"{machine_name()}-{world_size}{across}.json"


def process_memory_bytes(world_size: int) -> int:
    """This machine's memory divided among `world_size` processes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world_size


def _preset_cpu_cluster(world_size: int, nodes: int) -> Cluster:
    cluster = _cluster_of_node(find_node("CPU"), nodes, world_size // nodes)
    device = replace(cluster.device, memory_bytes=process_memory_bytes(world_size // nodes))
    return replace(cluster, device=device, profile=f"{cluster.profile} (this machine is not measured)")


def _detect_cuda(gpus: LocalGPUs, world_size: int | None) -> Cluster:
    node = find_node_of_gpu(gpus.name)
    world_size = world_size or int(os.environ.get("WORLD_SIZE", "0")) or gpus.count
    per_node = min(world_size, gpus.count)
    if world_size % per_node:
        raise ConfigurationError(f"{world_size} processes do not fill nodes of {per_node} GPUs ({gpus.name})")
    cluster = _cluster_of_node(node, world_size // per_node, per_node)
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=gpus.memory_bytes))
    path = operator_profile_path(gpus.name)
    return cluster.with_operator_profile(load_profile(path)) if path.exists() else cluster
