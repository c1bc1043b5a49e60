"""The host of a node: its memory, the links over which devices copy to it, and its files.

    host = Cluster.parse("8 A100").host
    host.link.to_host_bytes_per_second            # 25.8e9: one device that copies alone, in one direction
    host.link.devices_per_link                    # 2: of a pair that copies at once each gets half

The numbers of the presets are data: links and files in `cost_models/hardware/hosts.json`, what a node has of them in
`nodes.json`. `cost_models/copy_costs.py` prices copies with them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

USABLE_SHARE = 0.9
"""Part of a host's memory for what waits there; the system, loaders and Python have the rest."""
HARDWARE_DIRECTORY = Path(__file__).parent.parent / "cost_models" / "hardware"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Between a device and the memory of its host, with rates that copies of pinned memory reach."""

    name: str
    latency_seconds: float
    """Of a small copy, from its start to its end."""
    to_host_bytes_per_second: float
    from_host_bytes_per_second: float
    both_bytes_per_second: float
    """Of both directions together, where one device copies in both at once."""
    devices_per_link: int = 1
    """Devices behind one port of the host (a PCIe switch), which share these rates."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The local files of a node, which all its devices share."""

    name: str
    read_bytes_per_second: float
    write_bytes_per_second: float
    latency_seconds: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What stands beside the devices of one node."""

    memory_bytes: int
    """Of the node, for all its devices together."""
    memory_bytes_per_second: float
    """Reads plus writes of all that happens at once: where every device copies, it may be the bound."""
    link: HostLink
    storage: Storage | None = None
    """None: no file is counted on."""
    is_device_memory: bool = False
    """The devices are processes of this host, and their memory is this memory: a copy to the host frees nothing."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where its own numbers come from, by field name."""

    def bytes_per_device(self, devices: int) -> float:
        """What each of the `devices` of a node may have there."""
        return USABLE_SHARE * self.memory_bytes / devices


@dataclass(frozen=True, slots=True)
class Sourced:
    """A number of a preset, and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class HostPreset:
    """What a node type has: names of `hosts.json`, and its memory."""

    link: str
    memory_bytes: Sourced
    memory_bytes_per_second: Sourced
    devices_per_link: int = 1
    storage: str | None = None


@dataclass(frozen=True, slots=True)
class _LinkPreset:
    latency_seconds: Sourced
    to_host_bytes_per_second: Sourced
    from_host_bytes_per_second: Sourced
    both_bytes_per_second: Sourced


@dataclass(frozen=True, slots=True)
class _StoragePreset:
    read_bytes_per_second: Sourced
    write_bytes_per_second: Sourced
    latency_seconds: Sourced


@dataclass(frozen=True, slots=True)
class _Presets:
    links: dict[str, _LinkPreset]
    storages: dict[str, _StoragePreset]


@functools.cache
def _presets() -> _Presets:
    return msgspec.json.decode((HARDWARE_DIRECTORY / "hosts.json").read_bytes(), type=_Presets)


def host_link_names() -> list[str]:
    """Every link that `host_link` knows."""
    return list(_presets().links)


def host_link(name: str, devices_per_link: int = 1) -> HostLink:
    """The preset of exactly this name."""
    preset = _presets().links[name]
    to_host, from_host = preset.to_host_bytes_per_second, preset.from_host_bytes_per_second
    return HostLink(
        name=name,
        latency_seconds=preset.latency_seconds.value,
        to_host_bytes_per_second=to_host.value,
        from_host_bytes_per_second=from_host.value,
        both_bytes_per_second=preset.both_bytes_per_second.value,
        devices_per_link=devices_per_link,
        source=f"to the host: {to_host.source}; from the host: {from_host.source}; both at once: "
        f"{preset.both_bytes_per_second.source}; latency: {preset.latency_seconds.source}",
    )


def preset_storage(name: str) -> Storage:
    """The preset of exactly this name."""
    preset = _presets().storages[name]
    read, write = preset.read_bytes_per_second, preset.write_bytes_per_second
    return Storage(
        name=name,
        read_bytes_per_second=read.value,
        write_bytes_per_second=write.value,
        latency_seconds=preset.latency_seconds.value,
        source=f"read: {read.source}; write: {write.source}; latency: {preset.latency_seconds.source}",
    )


def preset_host(preset: HostPreset | None, devices_per_node: int) -> Host | None:
    """The host of a node of which so many devices are used; None for a node that has none of its own."""
    if preset is None:
        return None
    return Host(
        memory_bytes=int(preset.memory_bytes.value),
        memory_bytes_per_second=preset.memory_bytes_per_second.value,
        link=host_link(preset.link, min(preset.devices_per_link, devices_per_node)),
        storage=None if preset.storage is None else preset_storage(preset.storage),
        sources={name: getattr(preset, name).source for name in ("memory_bytes", "memory_bytes_per_second")},
    )
