"""Pipeline requests: what `dims` and `schedule` ask of a pipeline, read and checked before a model is captured.

dims={"pp": 4, "tp": 2}, schedule="zb-h1"     4 equal groups, tensor parallelism inside of each
dims={"pp": [1, 3]}                           the devices of every stage
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster, MixedCluster
from autopar.hardware.rank_groups import cluster_of, sub_cluster
from autopar.nearest_name import did_you_mean
from autopar.plans.plan_value import PIPELINE_AXIS
from autopar.request.mesh_axes import pinned_axes
from autopar.schedules.list_scheduler import FAMILIES

SEARCHED = "searched"
"""Asks for the best family's order to be improved by a free search (`searched_order.py`); names what that finds."""
UNEQUAL_FAMILIES = ("1f1b", "zb-h1", "zb-h2", "gpipe")
"""Schedules of stages on groups of different sizes."""

Dims: TypeAlias = Mapping[str, int | Sequence[int]]
"""Axis -> size; of "pp" also the devices of every stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """num_groups: size of the axis "pp". dims: of the other axes. family: of schedules, None for the best. sizes:
    devices of every stage, where groups are unequal."""

    num_groups: int
    dims: Mapping[str, int]
    family: str | None = None
    sizes: tuple[int, ...] = ()


def check_family(family: str) -> None:
    """Raise ConfigurationError for a family that does not exist."""
    if family not in FAMILIES and family != SEARCHED:
        known = (*FAMILIES, SEARCHED)
        raise ConfigurationError(f"schedule={family!r}: write one of {', '.join(known)}{did_you_mean(family, known)}")


def pipeline_request(
    cluster: Cluster, mesh: Sequence[int] | None, dims: Dims | None, schedule: str | None
) -> PipelineRequest | None:
    """What a request asks of a pipeline; None without "pp" on devices of one kind. Raises ConfigurationError."""
    if isinstance(cluster, MixedCluster):
        return _mixed_wish(cluster, mesh, dims, schedule)
    num_devices = cluster.num_devices
    if schedule is not None:
        check_family(schedule)
    groups = (dims or {}).get(PIPELINE_AXIS, 1)
    sizes = without_stages(dims) or {}
    if isinstance(groups, Sequence):
        return unequal_request(groups, sizes, schedule, num_devices)
    if not isinstance(groups, int) or isinstance(groups, bool) or groups == 0 or groups < -1:
        raise ConfigurationError(f"axis pp has size {groups!r}; write a positive number, or -1 to fill")
    if groups == -1:
        others = math.prod(size for size in sizes.values())
        if others < 1 or num_devices % others:
            raise ConfigurationError(f"dims {dict(dims or {})} do not divide {num_devices} devices")
        groups = num_devices // others
    if groups == 1:
        if schedule is not None:
            raise ConfigurationError(f'schedule={schedule!r} needs stages: pin them, for example dims={{"pp": 2}}')
        return None
    return PipelineRequest(num_groups=groups, dims=sizes, family=schedule)


def _mixed_wish(
    cluster: MixedCluster, mesh: Sequence[int] | None, dims: Dims | None, schedule: str | None
) -> PipelineRequest:
    """What is asked of a pipeline on several kinds; num_groups is -1 where it is open. Raises ConfigurationError."""
    others = without_stages(dims)
    if mesh is not None or others:
        raise ConfigurationError(
            f"{cluster.name!r} has devices of several kinds, on which a model runs as a pipeline whose stages choose "
            "their own meshes: leave out mesh= and all axes but pp, or plan for one part"
        )
    groups = (dims or {}).get(PIPELINE_AXIS, -1)
    if isinstance(groups, Sequence):
        return unequal_request(groups, {}, schedule, cluster.num_devices)
    if type(groups) is not int or (groups != -1 and groups < len(cluster.parts)):
        raise ConfigurationError(
            f"axis pp has size {groups!r}; {cluster.name!r} needs a stage on each of its {len(cluster.parts)} parts: "
            "write as many or more, the devices of every stage, or -1"
        )
    if schedule not in (None, *UNEQUAL_FAMILIES):
        raise ConfigurationError(
            f"schedule={schedule!r} on devices of several kinds: write one of {', '.join(UNEQUAL_FAMILIES)}"
        )
    return PipelineRequest(num_groups=groups, dims={}, family=schedule)


def unequal_request(
    groups: Sequence[int], others: Mapping[str, int], schedule: str | None, num_devices: int
) -> PipelineRequest:
    """Of dims={"pp": [1, 2]}: the devices of every stage, in order. Raises ConfigurationError."""
    if len(groups) < 2 or any(type(size) is not int or size < 1 for size in groups) or sum(groups) != num_devices:
        raise ConfigurationError(
            f"axis pp has groups of {list(groups)!r} devices; write two or more positive numbers that add up to "
            f"{num_devices}"
        )
    if others or schedule not in (None, *UNEQUAL_FAMILIES):
        raise ConfigurationError(
            f"stages on groups of {list(groups)} devices: their axes are chosen, so name no other axes than pp, and "
            f"schedules are {', '.join(UNEQUAL_FAMILIES)}"
        )
    return PipelineRequest(num_groups=len(groups), dims={}, family=schedule, sizes=tuple(groups))


def without_stages(dims: Dims | None) -> dict[str, int] | None:
    """`dims` without the axis "pp". Raises ConfigurationError for a size that is no number."""
    if dims is None:
        return None
    sizes = {}
    for name, size in dims.items():
        if name != PIPELINE_AXIS:
            if not isinstance(size, int):
                raise ConfigurationError(f"axis {name} has size {size!r}; write a positive number, or -1 to fill")
            sizes[name] = size
    return sizes


def check_stages(cluster: Cluster, mesh: Sequence[int] | None, dims: Dims | None, schedule: str | None) -> None:
    """Raise ConfigurationError where no pipeline on the cluster is what a request asks for."""
    asked = pipeline_request(cluster, mesh, dims, schedule)
    if asked is None or isinstance(cluster, MixedCluster):
        return
    for size in asked.sizes:
        cluster_of(cluster, size)
    if not asked.sizes:
        sub_cluster(cluster, asked.num_groups)
        pinned_axes(asked.dims, cluster.num_devices // asked.num_groups)
    policy = None if asked.family is None else FAMILIES.get(asked.family)
    if policy is not None and policy.both_ways and asked.num_groups % 2:
        raise ConfigurationError(
            f"schedule={asked.family!r} runs in both directions and needs an even number of rank groups, not "
            f"pp={asked.num_groups}"
        )
