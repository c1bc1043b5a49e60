"""What was measured on one machine, in place of the presets: the calibrated tier of collectives as data.

A profile names the texts it stands for and overrides fields of the two links, per kind of collective where they
differ (`collective_profiles.json`, each with its source):

    fitted("a100_dgx", "all_reduce", ranks=16, nodes=2, whole_nodes=False, tier="t1")   # (cluster, least seconds)

`nominal` is the other end: vendors' rates and no fitted trait.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from autopar.cost_models.nccl import TUNER_NETWORK_HOP_SECONDS
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import CollectiveTraits, Link
from benchmarks.validation.collective_machines import Machine, read_machine
from benchmarks.validation.schemas import Tier

PROFILES = Path(__file__).parent / "collective_profiles.json"

_NOMINAL_GBPS: Mapping[str, float] = {
    # per direction and device, as vendors write it (stas00/ml-engineering network/README.md @744d01e)
    "NVSwitch3": 300.0, "NVSwitch4": 450.0, "NVSwitch5": 900.0, "NVSwitch4-H800": 200.0, "NVLink2": 150.0,
    "xGMI": 448.0, "xGMI-MI250": 350.0, "PCIe4": 31.5, "NVLink3-pairs": 300.0, "NVLink3-bridge": 56.25,
    "NVLink4-pairs": 300.0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _LinkProfile:
    """Fields of a link and of its traits that a measurement replaces; None keeps the preset's."""

    bytes_per_second: float | None = None
    latency_seconds: float | None = None
    startup_seconds: float | None = None
    startup_seconds_per_rank: float = 0.0
    """Added to `startup_seconds` for each rank of the group."""
    ramp_seconds: float | None = None
    pass_seconds_per_byte: float | None = None
    ll_efficiency: float | None = None
    ll128_efficiency: float | None = None
    ll128: bool | None = None
    believed_bytes_per_second: float | None = None
    multicast_fraction: float | None = None
    pair_fraction: float | None = None
    pair_bytes_per_second: float | None = None
    ring_rates: tuple[tuple[int, float], ...] | None = None
    double_tree: bool | None = None

    def apply(self, link: Link, ranks: int) -> Link:
        """The link as this machine measured it."""
        traits = {
            name: getattr(self, name)
            for name in (field.name for field in dataclasses.fields(CollectiveTraits) if hasattr(self, field.name))
            if getattr(self, name) is not None
        }
        changed = dataclasses.replace(link.traits, **traits)
        startup = changed.startup_seconds + self.startup_seconds_per_rank * ranks
        return dataclasses.replace(
            link,
            bytes_per_second=self.bytes_per_second or link.bytes_per_second,
            latency_seconds=link.latency_seconds if self.latency_seconds is None else self.latency_seconds,
            traits=dataclasses.replace(changed, startup_seconds=startup),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Profile:
    matches: str
    """Regular expression over the text of the hardware column."""
    source: str
    stands_for: str = ""
    """Text that the presets are read from, where the file's own names no hardware."""
    least_seconds_per_rank: float = 0.0
    """A benchmark of one process launches its ranks one after the other."""
    intra: _LinkProfile = _LinkProfile()
    inter: _LinkProfile = _LinkProfile()
    """`bytes_per_second` is of one whole node, all its NICs."""
    by_kind: Mapping[str, _LinkProfile] = dataclasses.field(default_factory=dict)
    """Further overrides of the link inside a node, by kind of collective."""
    by_kind_inter: Mapping[str, _LinkProfile] = dataclasses.field(default_factory=dict)


@functools.cache
def _profiles() -> dict[str, _Profile]:
    return msgspec.json.decode(PROFILES.read_bytes(), type=dict[str, _Profile])


def fitted(
    hardware: str, kind: str, ranks: int, nodes: int, whole_nodes: bool, tier: Tier
) -> tuple[Cluster, float] | None:
    """The calibrated cluster and the least seconds of its benchmark; None where no profile stands for the text."""
    profile = next((p for p in _profiles().values() if re.search(p.matches, hardware, re.IGNORECASE)), None)
    if profile is None or tier != "t1":
        return None
    machine = read_machine(profile.stands_for or hardware)
    cluster = machine.cluster(ranks=ranks, nodes=nodes, whole_nodes=whole_nodes)
    intra, inter = cluster.intra_link, cluster.inter_link
    for change in (profile.intra, profile.by_kind.get(kind)):
        if change is not None:
            intra = change.apply(intra, ranks)
    for change in (profile.inter, profile.by_kind_inter.get(kind)):
        if change is not None:
            inter = _shared(change, cluster, machine).apply(inter, ranks)
    calibrated = dataclasses.replace(cluster, intra_link=intra, inter_link=inter, profile=f"measured: {profile.source}")
    return calibrated, profile.least_seconds_per_rank * ranks


def _shared(change: _LinkProfile, cluster: Cluster, machine: Machine) -> _LinkProfile:
    """The measured rate of a whole node as the share of one device; a NIC serves as many devices as in a full node."""
    if change.bytes_per_second is None:
        return change
    return dataclasses.replace(change, bytes_per_second=change.bytes_per_second / machine.node.devices_per_node)


def nominal(machine: Machine, ranks: int, nodes: int) -> Cluster:
    """The cluster by vendors' figures: nominal rates of links and NICs, NCCL's latencies, no fitted trait."""
    cluster = machine.cluster(ranks=ranks, nodes=nodes)
    link, network = cluster.intra_link, cluster.inter_link
    kept = CollectiveTraits(
        generation=link.traits.generation, interface=link.traits.interface, channels=link.traits.channels
    )
    rate = machine.node_bytes_per_second
    if rate is None:
        rate = machine.node.nics_per_node * machine.node.nic_bytes_per_second.value
    return dataclasses.replace(
        cluster,
        intra_link=dataclasses.replace(link, bytes_per_second=_NOMINAL_GBPS[link.name] * 1e9, fits=(), traits=kept),
        inter_link=dataclasses.replace(
            network,
            bytes_per_second=rate / machine.node.devices_per_node,
            latency_seconds=TUNER_NETWORK_HOP_SECONDS,
            fits=(),
            traits=CollectiveTraits(),
        ),
    )
