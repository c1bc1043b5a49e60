"""What was measured on the processes of a running job, over the network between its nodes, and the cluster it makes.

    torchrun --nnodes 4 --nproc-per-node 1 ... autopar profile        # on every node; then plans find it there

A profile of one machine (`machine_profile.py`) knows its loopback only. A job has links of two groups: groups of
processes inside of a node, and groups across nodes, while their siblings do the same:

    LinkFit(kind="all_reduce", ranks=4, nodes=4, latency_seconds=7e-3, bytes_per_second=11e6)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from autopar.cost_models.machine_profile import Profile, device_from_profile, source_of
from autopar.errors import ConfigurationError
from autopar.files import as_record, cache_directory, file_content, write_atomically
from autopar.hardware.cluster import Cluster, measured_cluster_path, process_memory_bytes
from autopar.hardware.devices import CollectiveFit, Link, preset_link
from autopar.hardware.sound_numbers import check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """seconds = latency + bytes of the full buffer / rate, of one collective in a group on `nodes` nodes."""

    kind: str
    ranks: int
    nodes: int
    latency_seconds: float
    bytes_per_second: float
    points: tuple[tuple[float, float], ...] = ()
    """(bytes, seconds) that the line goes through."""

    def seconds(self, nbytes: float) -> float:
        """Of a collective whose full buffer has so many bytes."""
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """One calibration of a job. machine: its processes without links, alone and all at once."""

    machine: Profile
    nodes: int
    ranks_per_node: int
    links: tuple[LinkFit, ...]
    overlap_slowdown: float = 1.0
    """How many times longer products take beside an all_reduce of all processes."""
    collective_host_seconds: float = 0.0
    """What is left of a small all_reduce of all processes where products hide all that can be hidden."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.ranks_per_node


def job_profile_path(name: str, nodes: int, ranks_per_node: int) -> Path:
    """Where the profile of such a job on machines of this name is kept."""
    return cache_directory() / "profiles" / f"{name}-{nodes}x{ranks_per_node}.json"


def load_job_profile(path: Path) -> JobProfile | None:
    """The stored profile; None where there is none. Raises ConfigurationError where the file is none."""
    return read_job_profile(path) if path.exists() else None


def read_job_profile(path: Path) -> JobProfile:
    """The profile of a file. Raises ConfigurationError where it is none, or says what nobody measures."""
    try:
        profile = as_record(file_content(path, "the file"), JobProfile, "the file")
        check_numbers(profile)
        cluster_of_job(profile)
        return profile
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{path} is not a profile of a job ({error}): delete it and calibrate again"
        ) from error


def save_job_profile(profile: JobProfile) -> Path:
    """Store a profile and the cluster that `Cluster.detect` finds in such a job; returns the path."""
    path = job_profile_path(profile.machine.name, profile.nodes, profile.ranks_per_node)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(profile, order="deterministic"), indent=1))
    cluster_of_job(profile).save(measured_cluster_path(profile.world_size, profile.nodes))
    return path


def cluster_of_job(profile: JobProfile) -> Cluster:
    """The job as a cluster; its links carry the measured lines of their groups."""
    memory = process_memory_bytes(profile.ranks_per_node)
    return Cluster(
        name=f"{profile.nodes}x{profile.ranks_per_node} {profile.machine.name}",
        num_nodes=profile.nodes,
        devices_per_node=profile.ranks_per_node,
        device=device_from_profile(profile.machine, profile.world_size, memory),
        intra_link=_link("loopback", [fit for fit in profile.links if fit.nodes == 1], profile),
        inter_link=_link("network", [fit for fit in profile.links if fit.nodes > 1], profile),
        collective_backend="gloo",
        profile=f"measured: {profile.machine.name}, {profile.machine.date}, {profile.nodes} nodes",
        overlap_slowdown=profile.overlap_slowdown,
        collective_host_seconds=profile.collective_host_seconds,
        host=profile.machine.host,
    )


def _link(name: str, fits: Sequence[LinkFit], profile: JobProfile) -> Link:
    """A link with the lines of its groups; hop and rate are those of neighbours, where a formula needs them."""
    if not fits:  # a node with a single process: nothing ever moves inside
        return preset_link("loopback")
    source = source_of(profile.machine)
    pairs = [fit for fit in fits if fit.kind == "neighbours"]
    if not pairs:
        raise ConfigurationError(f"links has no line of neighbours for the {name}: it was not measured")
    hop = max(pairs, key=lambda fit: fit.ranks)
    return Link(
        name=name,
        latency_seconds=hop.latency_seconds,
        bytes_per_second=hop.bytes_per_second,
        source=source,
        fits=tuple(
            CollectiveFit(
                kind=fit.kind,
                ranks=fit.ranks,
                latency_seconds=fit.latency_seconds,
                bytes_per_second=fit.bytes_per_second,
                source=source,
            )
            for fit in fits
        ),
    )


def groups_of_job(nodes: int, ranks_per_node: int) -> dict[tuple[int, int], list[list[int]]]:
    """(ranks, nodes) of a group -> the groups that are measured side by side: every shape that halves of a mesh take.

    All processes; those of a node; those at one place of all nodes; and halves of each down to pairs.
    """
    world = list(range(nodes * ranks_per_node))
    found: dict[tuple[int, int], list[list[int]]] = {}
    inside = [world[node * ranks_per_node : (node + 1) * ranks_per_node] for node in range(nodes)]
    across = [world[local::ranks_per_node] for local in range(ranks_per_node)]
    for groups in ([world], inside, across):
        while len(groups[0]) > 1:
            shape = len(groups[0]), len({rank // ranks_per_node for rank in groups[0]})
            found.setdefault(shape, groups)
            size = math.ceil(len(groups[0]) / 2)
            groups = [half for group in groups for half in (group[:size], group[size:]) if len(half) == size]
    return found
