"""Devices and links as values, and the shipped presets of both.

The numbers of the presets are data (`cost_models/hardware/*.json`): units in the keys, a source beside each.
A preset's ceilings were reached by a measurement wherever one is public, they are not vendor peaks:

    preset_device("H100-SXM").flops_per_second["bfloat16"]        # 794.5e12, where the vendor writes 989e12
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from autopar.errors import ConfigurationError
from autopar.hardware.device_curves import DeviceCurves, device_curves, has_curves
from autopar.hardware.hosts import HARDWARE_DIRECTORY, HostPreset, Sourced
from autopar.hardware.operator_profile import OperatorProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCurve:
    """Measured seconds of one operator over sizes, launch included.

    work: FLOPs of a product or of attention, else bytes read and written; ascending, one per entry of `seconds`.
    """

    operator: str
    """Bare ATen name: "mm", "tanh"."""
    dtype: str
    work: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.work) == len(self.seconds) > 0 or list(self.work) != sorted(self.work):
            raise ConfigurationError(
                f"the curve of {self.operator!r} needs as many seconds as work, and work that ascends: it has "
                f"{len(self.seconds)} and {len(self.work)}"
            )


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
    operators: tuple[OperatorCurve, ...] = ()
    """Measured operators, which count instead of the ceilings (`autopar profile`)."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each number comes from, by field name."""
    curves: DeviceCurves | None = None
    """What kernels reach of the ceilings; None: the roofline counts."""
    profile: OperatorProfile | None = None
    """Kernels measured on this device, which bend the curves."""


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
class CollectiveTraits:
    """How NCCL's collectives run on a link, beyond its rate and its hop (`cost_models/nccl.py`); 0: none of it."""

    generation: Literal["Volta", "Ampere", "Hopper", "Blackwell"] = "Ampere"
    """Of the devices on the link: the tuner's ceilings depend on it."""
    interface: Literal["nvlink", "pci"] = "nvlink"
    channels: int = 16
    startup_seconds: float = 0.0
    """Launch and synchronisation, beyond the latencies that NCCL's tuner knows."""
    ramp_seconds: float = 0.0
    """Added per doubling of the buffer beyond 1 MiB: a pipeline of larger chunks fills later."""
    ramp_bytes: float = 0.0
    """Of a network: the same as bytes in flight, to be divided by the rate of a node."""
    pass_seconds_per_byte: float = 0.0
    """What a byte of the full buffer costs beside the link, per pass (an all-reduce makes two)."""
    ll_efficiency: float = 0.5
    """Part of a network's rate that LL reaches; NCCL believes 0.5."""
    ll128_efficiency: float = 0.92
    """Part of the rate that LL128 reaches; NCCL believes 0.92 and chooses by that."""
    multicast_fraction: float = 0.0
    """Part of the link's rate at which a switch that reduces and multicasts takes the buffer of an all-reduce."""
    pair_fraction: float = 1.0
    """Part of the link's rate that all-to-all pairs reach."""
    pair_bytes_per_second: float = 0.0
    """Rate between two devices where they are wired in a mesh (all pairs at once reach more)."""
    ring_rates: tuple[tuple[int, float], ...] = ()
    """(ranks, bytes/s of a ring of so many) where the wiring makes the rate depend on the number of ranks. Of a
    network: (ranks on one node, bytes/s of all the NICs of that node)."""
    ll128: bool = True
    """Of a network: LL128 is allowed (not where a NIC hangs on another PCI switch than its GPU, as in many VMs)."""
    believed_bytes_per_second: float = 0.0
    """Of a network: a device's share of what NCCL reads off the NICs and chooses by; 0: the real rate."""
    double_tree: bool = False
    """Of a network: two nodes exchange by a double tree, which sends half of what a ring does."""
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
    traits: CollectiveTraits = CollectiveTraits()


@dataclass(frozen=True, slots=True)
class _DevicePreset:
    kind: Literal["cuda", "cpu"]
    aliases: tuple[str, ...]
    runtime_names: tuple[str, ...]
    node: str
    memory_bytes: Sourced
    memory_bytes_per_second: Sourced
    launch_seconds: Sourced
    flops_per_second: dict[str, Sourced]


@dataclass(frozen=True, slots=True)
class _LinkPreset:
    latency_seconds: Sourced
    bytes_per_second: Sourced | None = None
    rate_fraction: Sourced | None = None
    """Of a network: the part of the NIC's nominal rate that collectives reach."""
    fits: tuple[CollectiveFit, ...] = ()
    traits: CollectiveTraits = CollectiveTraits()


@dataclass(frozen=True, slots=True)
class NodePreset:
    """A node type: which devices, links and NICs; `nic_bytes_per_second` is one NIC's nominal rate."""

    device: str
    devices_per_node: int
    intra_link: str
    network_link: str
    nics_per_node: int
    nic_bytes_per_second: Sourced
    collective_backend: Literal["nccl", "gloo"]
    aliases: tuple[str, ...] = ()
    host: HostPreset | None = None


@functools.cache
def _device_presets() -> dict[str, _DevicePreset]:
    return msgspec.json.decode((HARDWARE_DIRECTORY / "devices.json").read_bytes(), type=dict[str, _DevicePreset])


@functools.cache
def _node_presets() -> dict[str, NodePreset]:
    return msgspec.json.decode((HARDWARE_DIRECTORY / "nodes.json").read_bytes(), type=dict[str, NodePreset])


@functools.cache
def _link_presets() -> dict[str, _LinkPreset]:
    return msgspec.json.decode((HARDWARE_DIRECTORY / "links.json").read_bytes(), type=dict[str, _LinkPreset])


def has_units(device: Device, dtype: str) -> bool:
    """Whether a device multiplies in a dtype: a GPU has a rate for it, a CPU computes it somehow."""
    return device.kind == "cpu" or dtype in device.flops_per_second


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
        curves=device_curves(name) if has_curves(name) else None,
    )


def pricing_tier(device: Device) -> str:
    """Which layer prices the operators of a device, in words for `Cluster.profile`."""
    if device.profile is not None:
        return f"operators measured on {device.profile.device} ({device.profile.name}, {device.profile.date})"
    if device.curves is None:
        return "operators by roofline"
    if device.curves.tier == "fitted":
        return f"operators by curves fitted on {device.curves.name}"
    return f"operators by curves that all GPUs share, none fitted on {device.curves.name}"


def preset_link(name: str) -> Link:
    """The preset of exactly this name of a link inside a node."""
    preset = _link_presets()[name]
    assert preset.bytes_per_second is not None, f"{name} is a network: its rate belongs to the node"
    source = f"latency: {preset.latency_seconds.source}; rate: {preset.bytes_per_second.source}"
    return Link(name=name, latency_seconds=preset.latency_seconds.value, source=source,
                bytes_per_second=preset.bytes_per_second.value, fits=preset.fits, traits=preset.traits)  # fmt: skip


def find_node(name: str) -> NodePreset:
    """The node type of this name, or the usual node of the device of this name or alias.

    Case does not matter, nor whether words are parted by "-", "_" or a space: "DGX H100" is "dgx-h100". Raises
    ConfigurationError for an unknown name, with the nearest known one and all presets.
    """
    nodes = {_plain(known): preset for node, preset in _node_presets().items() for known in (node, *preset.aliases)}
    for device, preset in _device_presets().items():
        own_node = replace(_node_presets()[preset.node], device=device)
        nodes.update((_plain(known), own_node) for known in (device, *preset.aliases))
    if _plain(name) in nodes:
        return nodes[_plain(name)]
    near = difflib.get_close_matches(_plain(name), nodes, n=1, cutoff=0.0)
    display = {_plain(known): known for known in preset_names()}
    raise ConfigurationError(
        f"unknown device or node type {name!r}; did you mean {display.get(near[0], near[0].upper())!r}? "
        f"Presets: {', '.join(preset_names())}. Other hardware: Cluster.from_file(path)"
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def find_node_of_gpu(name: str) -> NodePreset:
    """The usual node of a GPU, by the name that its driver reports ("NVIDIA H100 80GB HBM3")."""
    for device, preset in _device_presets().items():
        if any(known.lower() in name.lower() for known in preset.runtime_names):
            return replace(_node_presets()[preset.node], device=device)
    raise ConfigurationError(
        f"no preset for the GPU {name!r}; describe it with Cluster.from_file(path). "
        f"Presets: {', '.join(preset_names())}"
    )


def network_link(node: NodePreset, devices_per_node: int, rate: float | None = None) -> Link:
    """The network between nodes of this type of which `devices_per_node` devices are used.

    `rate`: bytes/s of one node's NICs together, per direction; None takes those of the node type.
    """
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
        traits=preset.traits,
    )
