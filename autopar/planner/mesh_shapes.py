"""Mesh shapes: which meshes a question leaves to try.

resolve_meshes(8, (2, 4), None, log)              the given one
resolve_meshes(8, None, {"tp": 4}, log)           named axes, the rest as a free outer axis
resolve_meshes(8, None, None, log)                every factorisation
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autopar.errors import ConfigurationError
from autopar.layout import Mesh
from autopar.planner.constraints import BATCH_AXES

LATER_AXES = {"cp": "context", "ep": "expert", "pp": "pipeline"}
AXIS_NAMES = (*BATCH_AXES, "tp")
FREE_AXIS_NAMES = ("outer", "inner")


def resolve_meshes(
    num_devices: int, mesh: Sequence[int] | None, dims: Mapping[str, int] | None, log: Callable[[str], None]
) -> list[Mesh]:
    """The meshes to try: the given one, the pinned axes with free ones in front, or every 1-D and 2-D factorisation.

    Raises ConfigurationError for unknown axes and sizes that do not divide the devices.
    """
    if mesh is not None and dims is not None:
        raise ConfigurationError("give mesh= (sizes) or dims= (named sizes), not both")
    if mesh is not None:
        return [_sized_mesh(tuple(mesh), num_devices)]
    if dims:
        return _named_meshes(dict(dims), num_devices)
    shapes = [(num_devices,), *((a, num_devices // a) for a in range(2, num_devices) if num_devices % a == 0)]
    log(f"trying meshes {', '.join(map(str, shapes))}")
    return [Mesh(FREE_AXIS_NAMES[-len(shape) :], shape) for shape in shapes]


def _sized_mesh(shape: tuple[int, ...], num_devices: int) -> Mesh:
    if not shape or any(size < 1 for size in shape) or math.prod(shape) != num_devices:
        raise ConfigurationError(f"mesh {shape} has {math.prod(shape)} devices, the cluster {num_devices}")
    if len(shape) > 2:
        raise ConfigurationError(f"mesh {shape} has {len(shape)} axes; 1 or 2 are supported")
    return Mesh(FREE_AXIS_NAMES[-len(shape) :], shape)


def _named_meshes(dims: dict[str, int], num_devices: int) -> list[Mesh]:
    for name, size in dims.items():
        if name in LATER_AXES:
            raise ConfigurationError(f"axis {name} ({LATER_AXES[name]} parallelism) comes in a later version")
        if name not in AXIS_NAMES:
            raise ConfigurationError(f"unknown axis {name!r}; axes are {', '.join(AXIS_NAMES)}")
        if not isinstance(size, int) or size == 0 or size < -1:
            raise ConfigurationError(f"axis {name} has size {size!r}; write a positive number, or -1 to fill")
    fixed = math.prod(size for size in dims.values() if size > 0)
    fill = [name for name, size in dims.items() if size == -1]
    if num_devices % fixed or len(fill) > 1:
        raise ConfigurationError(f"dims {dims} (product {fixed}) do not divide {num_devices} devices")
    rest = num_devices // fixed
    if fill:
        dims[fill[0]], rest = rest, 1
    names = [name for name in AXIS_NAMES if dims.get(name, 1) > 1]
    shape = tuple(dims[name] for name in names)
    if rest > 1:
        names, shape = ["outer", *names], (rest, *shape)
    if not names:
        names, shape = [next(iter(dims))], (1,)
    if len(names) > 2:
        raise ConfigurationError(f"dims {dims} need {len(names)} mesh axes; 1 or 2 are supported")
    return [Mesh(tuple(names), shape)]
