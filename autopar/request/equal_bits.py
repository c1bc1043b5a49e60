"""Equal bits: whether a request for logical shards can be met, as far as it says before there is a plan.

    deterministic=8, dims={"tp": 2}     ConfigurationError: tp splits more than the batch
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.plans.logical_shards import Deterministic, is_power_of_two, num_shards
from autopar.request.mesh_axes import BATCH_AXES, pinned_axes

WHAT = "equal bits on any number of processes"


def check_equal_bits(
    deterministic: Deterministic,
    cluster: Cluster,
    mesh: Sequence[int] | None,
    dims: Mapping[str, int | Sequence[int]] | None,
    schedule: str | None,
    micro_batches: int | None,
) -> None:
    """Raise ConfigurationError for what cannot have equal bits in logical shards, with the axis or number of it."""
    shards = num_shards(deterministic)
    if not shards:
        return
    asked, devices = f"deterministic={shards}", cluster.num_devices
    if shards < 2 or not is_power_of_two(shards):
        raise ConfigurationError(f"{asked}: the batch is cut into 2, 4, 8, 16, ... logical shards; write one of these")
    if cluster.device.kind != "cpu":
        raise ConfigurationError(
            f"{asked}: {WHAT} are there on CPUs, not on {cluster.device.name}; deterministic=True asks for equal bits "
            "of equal plans"
        )
    if shards % devices:
        raise ConfigurationError(
            f"{asked}: {shards} logical shards do not lie evenly on {devices} devices; take 1, 2, 4, ... devices, up "
            f"to {shards}, or more shards"
        )
    split = sorted(set(dims or {}) - set(BATCH_AXES))
    if split or schedule is not None:
        named = f"dims with {', '.join(split)}" if split else f"schedule={schedule!r}"
        raise ConfigurationError(
            f"{asked}: {named} splits more than the batch, and sums then depend on the number of devices; write "
            f'dims={{"dp_shard": {devices}}} (ZeRO-3), dims={{"dp_replicate": {devices}}} (DDP), or no dims; '
            "deterministic=True asks for equal bits of equal plans"
        )
    _check_one_axis(asked, devices, mesh, dims)
    if micro_batches not in (None, shards // devices):
        raise ConfigurationError(
            f"{asked} on {devices} devices runs {shards // devices} micro-batches, one per logical shard of a device, "
            f"not micro_batches={micro_batches}: leave that out"
        )


def _check_one_axis(
    asked: str, devices: int, mesh: Sequence[int] | None, dims: Mapping[str, int | Sequence[int]] | None
) -> None:
    sizes = [size for size in mesh or () if size != 1]
    if dims:
        pinned = pinned_axes({name: size for name, size in dims.items() if isinstance(size, int)}, devices)
        sizes = [*pinned.values(), devices // math.prod(pinned.values())]
    if len([size for size in sizes if size != 1]) > 1:
        raise ConfigurationError(
            f"{asked}: sums go over one axis of all {devices} devices, and the mesh has several: write "
            f'dims={{"dp_shard": {devices}}} or dims={{"dp_replicate": {devices}}}'
        )
