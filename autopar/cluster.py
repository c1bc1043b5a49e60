"""The cluster a plan is made for: devices, the links between them, and who shares which link.

    Cluster.parse("2x8 H100-SXM")             # 2 nodes of 8 GPUs, priced by the shipped preset
    Cluster.parse("32x8 A100-80 @ 800Gb")     # network rate per node, per direction
    Cluster.parse("4 cpu")                    # 4 gloo processes on one machine
    Cluster.detect()                          # this machine, by its measured profile where there is one

Everything here is a value: no torch, no device, no process group. The numbers of the presets are data
(`cost_models/hardware/*.json`), each with its unit in the key and its source beside it.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import math
import os
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Literal

import msgspec

from autopar.errors import ConfigurationError
from autopar.files import cache_directory, write_atomically

HARDWARE_DIRECTORY = Path(__file__).parent / "cost_models" / "hardware"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU process, with ceilings that a measurement reached (not vendor peaks)."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    """Total memory of the device; the allocator margin is subtracted by `cost_models.memory`."""
    flops_per_second: Mapping[str, float]
    """Best measured matmul rate by dtype name ("bfloat16", "float32")."""
    memory_bytes_per_second: float
    """Reads plus writes of a large elementwise kernel."""
    launch_seconds: float
    """What the shortest kernel takes: launch, scheduling and tail."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each number comes from, by field name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit:
    """A measured line of one collective among `ranks` devices: latency_seconds + nbytes / bytes_per_second.

    `nbytes` is the full logical buffer (all-gather output, reduce-scatter input, all-reduce buffer,
    all-to-all local send total). The line holds for large buffers of a ring of this size.
    """

    kind: str
    ranks: int
    latency_seconds: float
    bytes_per_second: float
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A class of links: inside a node, or between nodes (then the share of one device in its node's NICs)."""

    name: str
    latency_seconds: float
    """One hop of a small message, one way."""
    bytes_per_second: float
    """Per direction and per device, as a ring of collectives reaches it."""
    source: str = ""
    fits: tuple[CollectiveFit, ...] = ()
    """Measured collectives on this link; they replace the formula for their ring sizes."""


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

        Without "<nodes>x" the devices fill nodes of the type's usual size. Raises ConfigurationError for
        text of another form and for unknown names (with the nearest name and all presets).
        """
        match = _CLUSTER_TEXT.fullmatch(text.strip())
        if match is None:
            raise ConfigurationError(
                f'cannot read cluster {text!r}: expected "<nodes>x<devices> <type>[ @ <rate>Gb]", '
                'for example "2x8 H100-SXM", "32x8 A100-80 @ 800Gb" or "4 cpu"'
            )
        node = _find_node(match["name"])
        num_nodes, devices_per_node = _split_devices(text, match["nodes"], int(match["devices"]), node)
        if not num_nodes or not devices_per_node:
            raise ConfigurationError(f"cluster {text!r} has no device")
        rate = _bytes_per_second(match["rate"], match["unit"]) if match["rate"] else None
        return _cluster_of_node(node, num_nodes, devices_per_node, rate)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster that `save` wrote. Raises ConfigurationError where the content is not a cluster."""
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (msgspec.DecodeError, OSError) as error:
            raise ConfigurationError(f"cannot read a cluster from {os.fspath(path)!r}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster as JSON, atomically."""
        write_atomically(
            path, msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=1)
        )

    @classmethod
    def detect(cls, world_size: int | None = None) -> Cluster:
        """Describe this machine: its GPUs by name, else its CPU by the cached measurement or the preset.

        `world_size` is the number of processes; by default $WORLD_SIZE, else all GPUs, else all cores.
        `profile` says which tier was taken; `python -m autopar.runtime.calibrate` makes the measurement.
        """
        import torch  # noqa: PLC0415 - only here does a cluster look at devices; plans must not pay for torch

        if torch.cuda.is_available():
            gpu = torch.cuda.get_device_properties()
            return _detect_cuda(gpu.name, gpu.total_memory, torch.cuda.device_count(), world_size)
        processes = world_size or int(os.environ.get("WORLD_SIZE", "0")) or os.cpu_count() or 1
        measured = measured_cluster_path(processes)
        return cls.from_file(measured) if measured.exists() else _preset_cpu_cluster(processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTopology:
    """How the groups of one set of mesh axes lie on the nodes (of unequal groups, the worst)."""

    ranks: int
    """Devices of one group."""
    nodes: int
    """Nodes that one group spans."""
    ranks_per_node: int
    """Most devices of one group in one node."""
    groups_per_node: int
    """Sibling groups that share a node's NICs; all siblings run their collective at the same time."""

    @classmethod
    def of(cls, cluster: Cluster, mesh_shape: Sequence[int], axes: Iterable[int]) -> GroupTopology:
        """Topology of the collective over `axes` (indices) of a mesh laid row-major over the ranks.

        The last axis is innermost: mesh (2, 8) on 2 nodes of 8 keeps axis 1 inside the nodes.
        Raises ConfigurationError where the mesh has more devices than the cluster or lacks an axis.
        """
        shape, chosen = tuple(mesh_shape), frozenset(axes)
        if math.prod(shape) > cluster.num_devices:
            raise ConfigurationError(
                f"mesh {shape} needs {math.prod(shape)} devices, "
                f"cluster {cluster.name!r} has {cluster.num_devices}"
            )
        if not chosen <= set(range(len(shape))):
            raise ConfigurationError(f"mesh {shape} has no axes {sorted(chosen - set(range(len(shape))))}")
        return _group_topology(cluster.devices_per_node, shape, chosen)


@functools.lru_cache(maxsize=4096)
def _group_topology(
    devices_per_node: int, mesh_shape: tuple[int, ...], axes: frozenset[int]
) -> GroupTopology:
    node_counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for rank, coordinates in enumerate(product(*map(range, mesh_shape))):
        group = tuple(c for axis, c in enumerate(coordinates) if axis not in axes)
        node_counts[group][rank // devices_per_node] += 1
    groups_on_node = Counter(node for counts in node_counts.values() for node in counts)
    return GroupTopology(
        ranks=math.prod(mesh_shape[axis] for axis in axes),
        nodes=max(len(counts) for counts in node_counts.values()),
        ranks_per_node=max(max(counts.values()) for counts in node_counts.values()),
        groups_per_node=max(groups_on_node.values()),
    )


# ---- presets


@dataclass(frozen=True, slots=True)
class _Sourced:
    value: float
    source: str


@dataclass(frozen=True, slots=True)
class _DevicePreset:
    kind: Literal["cuda", "cpu"]
    aliases: tuple[str, ...]
    runtime_names: tuple[str, ...]
    node: str
    memory_bytes: _Sourced
    memory_bytes_per_second: _Sourced
    launch_seconds: _Sourced
    flops_per_second: dict[str, _Sourced]


@dataclass(frozen=True, slots=True)
class _LinkPreset:
    latency_seconds: _Sourced
    bytes_per_second: _Sourced | None = None
    rate_fraction: _Sourced | None = None
    """Of a network: the part of the NIC's nominal rate that collectives reach."""
    fits: tuple[CollectiveFit, ...] = ()


@dataclass(frozen=True, slots=True)
class _NodePreset:
    device: str
    devices_per_node: int
    intra_link: str
    network_link: str
    nics_per_node: int
    nic_bytes_per_second: _Sourced
    collective_backend: Literal["nccl", "gloo"]


@functools.cache
def _device_presets() -> dict[str, _DevicePreset]:
    return msgspec.json.decode(
        (HARDWARE_DIRECTORY / "devices.json").read_bytes(), type=dict[str, _DevicePreset]
    )


@functools.cache
def _node_presets() -> dict[str, _NodePreset]:
    return msgspec.json.decode((HARDWARE_DIRECTORY / "nodes.json").read_bytes(), type=dict[str, _NodePreset])


@functools.cache
def _link_presets() -> dict[str, _LinkPreset]:
    return msgspec.json.decode((HARDWARE_DIRECTORY / "links.json").read_bytes(), type=dict[str, _LinkPreset])


def preset_names() -> list[str]:
    """Every device and node type that `Cluster.parse` knows, without their aliases."""
    return [*_device_presets(), *_node_presets()]


def preset_device(name: str) -> Device:
    """The device preset of exactly this name."""
    preset = _device_presets()[name]
    sources = {f"flops_per_second[{dtype}]": rate.source for dtype, rate in preset.flops_per_second.items()}
    for quantity in ("memory_bytes", "memory_bytes_per_second", "launch_seconds"):
        sources[quantity] = getattr(preset, quantity).source
    return Device(
        name=name,
        kind=preset.kind,
        memory_bytes=int(preset.memory_bytes.value),
        flops_per_second={dtype: rate.value for dtype, rate in preset.flops_per_second.items()},
        memory_bytes_per_second=preset.memory_bytes_per_second.value,
        launch_seconds=preset.launch_seconds.value,
        sources=sources,
    )


def preset_link(name: str) -> Link:
    """The preset of exactly this name of a link inside a node."""
    preset = _link_presets()[name]
    assert preset.bytes_per_second is not None, f"{name} is a network: its rate belongs to the node"
    source = f"latency: {preset.latency_seconds.source}; rate: {preset.bytes_per_second.source}"
    return Link(name=name, latency_seconds=preset.latency_seconds.value, source=source,
                bytes_per_second=preset.bytes_per_second.value, fits=preset.fits)  # fmt: skip


_CLUSTER_TEXT = re.compile(
    r"(?:(?P<nodes>\d+)\s*x\s*)?(?P<devices>\d+)\s+(?P<name>[^@]*[^@\s])"
    r"(?:\s*@\s*(?P<rate>\d+(?:\.\d+)?)\s*(?P<unit>[GMgm](?:[bB]|bit|bps)(?:/s)?))?"
)


def _bytes_per_second(rate: str, unit: str) -> float:
    """Rate in bytes/s; "Gb", "Gbit" and "Gbps" count bits, "GB" counts bytes."""
    scale = 1e9 if unit[0] in "Gg" else 1e6
    return float(rate) * scale / (1.0 if unit[1] == "B" else 8.0)


def _find_node(name: str) -> _NodePreset:
    nodes = {node.lower(): preset for node, preset in _node_presets().items()}
    for device, preset in _device_presets().items():
        own_node = replace(_node_presets()[preset.node], device=device)
        nodes.update((known.lower(), own_node) for known in (device, *preset.aliases))
    if name.lower() in nodes:
        return nodes[name.lower()]
    near = difflib.get_close_matches(name.lower(), nodes, n=1, cutoff=0.0)
    display = {known.lower(): known for known in preset_names()}
    raise ConfigurationError(
        f"unknown device or node type {name!r}; did you mean {display.get(near[0], near[0].upper())!r}? "
        f"Presets: {', '.join(preset_names())}. Other hardware: Cluster.from_file(path)"
    )


def _split_devices(text: str, nodes: str | None, devices: int, node: _NodePreset) -> tuple[int, int]:
    if nodes is not None:
        return int(nodes), devices
    if devices <= node.devices_per_node:
        return 1, devices
    if devices % node.devices_per_node:
        raise ConfigurationError(
            f"cluster {text!r}: {devices} devices do not fill nodes of {node.devices_per_node}; "
            "write <nodes>x<devices>"
        )
    return devices // node.devices_per_node, node.devices_per_node


def _cluster_of_node(
    node: _NodePreset, num_nodes: int, devices_per_node: int, rate: float | None = None
) -> Cluster:
    """`rate`: bytes/s of one node's network, per direction; None takes the NICs of the node type."""
    suffix = "" if rate is None else f" @ {rate * 8e-9:g}Gb"
    return Cluster(
        name=f"{num_nodes}x{devices_per_node} {node.device}{suffix}",
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=preset_device(node.device),
        intra_link=preset_link(node.intra_link),
        inter_link=_network_link(node, devices_per_node, rate),
        collective_backend=node.collective_backend,
        profile=f"preset: {node.device}, {node.intra_link}, {node.network_link}",
    )


def _network_link(node: _NodePreset, devices_per_node: int, rate: float | None) -> Link:
    preset = _link_presets()[node.network_link]
    assert preset.rate_fraction is not None, f"{node.network_link} is not a network"
    if rate is None:
        nics = max(1.0, node.nics_per_node * min(1.0, devices_per_node / node.devices_per_node))
        node_rate, rate_source = nics * node.nic_bytes_per_second.value, node.nic_bytes_per_second.source
    else:
        node_rate, rate_source = rate, "given by the user"
    return Link(
        name=node.network_link,
        latency_seconds=preset.latency_seconds.value,
        bytes_per_second=node_rate * preset.rate_fraction.value / devices_per_node,
        source=f"latency: {preset.latency_seconds.source}; rate of a node: {rate_source}, "
        f"x {preset.rate_fraction.value}: {preset.rate_fraction.source}",
        fits=preset.fits,
    )


# ---- this machine


def machine_name() -> str:
    """A stable name of this machine's processor, for file names: "amd-epyc-2-cores"."""
    model = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpu_info.read_text(), re.MULTILINE)
        model = found[1] if found else model
    words = re.findall(r"[a-z0-9]+", model.lower())
    return "-".join([*words, str(os.cpu_count() or 1), "cores"])


def measured_cluster_path(world_size: int) -> Path:
    """Where `cost_models.calibration` leaves the measured cluster of `world_size` local processes."""
    return cache_directory() / "clusters" / f"{machine_name()}-{world_size}.json"


def process_memory_bytes(world_size: int) -> int:
    """This machine's memory divided among `world_size` processes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world_size


def _preset_cpu_cluster(world_size: int) -> Cluster:
    cluster = _cluster_of_node(_node_presets()["CPU-node"], 1, world_size)
    device = replace(cluster.device, memory_bytes=process_memory_bytes(world_size))
    return replace(cluster, device=device, profile=f"{cluster.profile} (this machine is not measured)")


def _detect_cuda(name: str, memory_bytes: int, devices_per_node: int, world_size: int | None) -> Cluster:
    for device, preset in _device_presets().items():
        if any(known.lower() in name.lower() for known in preset.runtime_names):
            world_size = world_size or int(os.environ.get("WORLD_SIZE", "0")) or devices_per_node
            per_node = min(world_size, devices_per_node)
            node = replace(_node_presets()[preset.node], device=device)
            cluster = _cluster_of_node(node, -(-world_size // per_node), per_node)
            return replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))
    raise ConfigurationError(
        f"no preset for the GPU {name!r}; describe it with Cluster.from_file(path). "
        f"Presets: {', '.join(preset_names())}"
    )
