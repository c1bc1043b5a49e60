"""Offload: what may wait in the memory of the host between its uses, as asked by `offload=`.

    activations    what forward saves for backward
    parameters     parameters with their gradients and the optimizer's state; its step runs on the host
    all            both
    none           nothing

What is asked for is chosen where it makes room that memory lacks; without a word nothing is.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.nearest_name import did_you_mean

Offload: TypeAlias = Literal["none", "activations", "parameters", "all"]
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
ACTIVATIONS, PARAMETERS = "activations", "parameters"
_BOTH = frozenset({ACTIVATIONS, PARAMETERS})


def check_offload(asked: str | None, cluster: Cluster, has_stages: bool) -> None:
    """Raise ConfigurationError for what there is not, for a cluster whose host cannot take it, and for parameters
    beside stages, which hold theirs."""
    if asked is None:
        return
    if asked not in OFFLOADS:
        near = did_you_mean(asked, OFFLOADS)
        raise ConfigurationError(f"offload={asked!r}: write one of {', '.join(OFFLOADS)}{near}")
    if asked == "none":
        return
    if reason := why_not(cluster):
        raise ConfigurationError(f"offload={asked!r}: {reason}")
    if has_stages and asked != ACTIVATIONS:
        raise ConfigurationError(
            f"offload={asked!r}: stages keep their parameters on the device; leave out pp= or write "
            f'offload="{ACTIVATIONS}"'
        )


def why_not(cluster: Cluster) -> str | None:
    """Why nothing can wait on the host of a cluster; None where something can."""
    if cluster.host is None:
        return f"the cluster {cluster.name!r} says nothing of its host: give it one (docs/adding-hardware.md)"
    if cluster.host.is_device_memory:
        return f"the devices of {cluster.name!r} are processes of the host, whose memory is theirs"
    return None


def may_wait(asked: Offload | None) -> frozenset[str]:
    """Of "activations" and "parameters", what an answer allows."""
    if asked == "all":
        return _BOTH
    return _BOTH & {str(asked)}
