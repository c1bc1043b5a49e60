"""Mesh axes: what `mesh=` and `dims=` say of the mesh, read and checked.

    dims={"tp": 4, "dp_shard": -1}      named axes; free ones lie in front of them
    mesh=(2, 4)                         sizes alone: the axes are called outer and inner, and are free

What the name of an axis asks of a plan: `planner/problem/axis_presets.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.nearest_name import did_you_mean
from autopar.plans.expert_hops import INNER_EXPERT_AXIS
from autopar.plans.plan_value import PIPELINE_AXIS

BATCH_AXES = ("dp_replicate", "dp_shard")
CONTEXT_AXES = ("cp", "cp_inner")
"""Axes that split the sequence. With two of them attention may do one thing over the outer one and another over the
inner one, as a ring across nodes of ranks that split heads inside each; `cp` alone leaves open how it is cut."""
EXPERT_AXIS = "ep"
EXPERT_AXES = (EXPERT_AXIS, INNER_EXPERT_AXIS)
"""Axes that split the batch, and the experts: their rows travel, or as asked otherwise. With two of them rows travel
over the outer one and then over the inner one: once between nodes, and on inside each."""
AXIS_NAMES = (*BATCH_AXES, *CONTEXT_AXES, *EXPERT_AXES, "tp")
"""Axes of a mesh; in front of them a pipeline has its own."""
MOST_AXES = 4
"""Of a mesh: two kinds of links with two uses each (split the batch, split the model) are four."""
FREE_AXIS_NAMES: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("inner",),
    2: ("outer", "inner"),
    3: ("outer", "middle", "inner"),
    4: ("outermost", "outer", "middle", "inner"),
}
"""Names of the free axes of a mesh, by their number."""


def check_axes(cluster: Cluster, mesh: Sequence[int] | None, dims: Mapping[str, int] | None) -> None:
    """Raise ConfigurationError where no mesh on the cluster is what a request asks for."""
    if mesh is not None and dims is not None:
        raise ConfigurationError("give mesh= (sizes) or dims= (named sizes), not both")
    if mesh is not None:
        sized_mesh(mesh, cluster.num_devices)
    else:
        pinned_axes(dims or {}, cluster.num_devices)


def sized_mesh(sizes: Sequence[int], num_devices: int) -> Mesh:
    """The mesh of free axes with these sizes. Raises ConfigurationError where it is none of the devices."""
    shape = tuple(sizes)
    if not shape or any(size < 1 for size in shape) or math.prod(shape) != num_devices:
        raise ConfigurationError(f"mesh {shape} has {math.prod(shape)} devices, the cluster {num_devices}")
    if len(shape) > MOST_AXES:
        raise ConfigurationError(f"mesh {shape} has {len(shape)} axes; at most {MOST_AXES} are supported")
    return Mesh(FREE_AXIS_NAMES[len(shape)], shape)


def pinned_axes(dims: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """The named axes of more than one device, outermost first, with -1 filled in. Raises ConfigurationError for unknown
    axes and for sizes that do not divide the devices."""
    for name, size in dims.items():
        if name not in AXIS_NAMES:
            known = (*AXIS_NAMES, PIPELINE_AXIS)
            raise ConfigurationError(f"unknown axis {name!r}; axes are {', '.join(known)}{did_you_mean(name, known)}")
        if not isinstance(size, int) or size == 0 or size < -1:
            raise ConfigurationError(f"axis {name} has size {size!r}; write a positive number, or -1 to fill")
    fixed = math.prod(size for size in dims.values() if size > 0)
    fill = [name for name, size in dims.items() if size == -1]
    if len(fill) > 1:
        raise ConfigurationError(f"dims {dict(dims)}: -1 fills what is left, so one axis at most may have it")
    if num_devices % fixed:
        raise ConfigurationError(f"dims {dict(dims)} (product {fixed}) do not divide {num_devices} devices")
    filled = {**dims, **dict.fromkeys(fill, num_devices // fixed)}
    return {name: filled[name] for name in AXIS_NAMES if filled.get(name, 1) > 1}
