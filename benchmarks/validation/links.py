"""Seconds of single transfers of a published run: over its axes, from stage to stage, around a ring.

collective(run, "all_gather", ("dp_shard",), 1e9)         # all ranks of the axis, among its siblings
neighbour_seconds(run, 1e6, distance=8)                   # to the rank 8 further, over the network or not
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.collective_costs import CollectiveKind, collective_seconds
from autopar.cost_models.simulator import GALVATRON_OVERLAP
from autopar.hardware.group_topology import GroupTopology
from benchmarks.validation.lowered import mesh
from benchmarks.validation.runs import TrainingRun
from benchmarks.validation.schemas import Tier


def collective(run: TrainingRun, kind: CollectiveKind, axes: Sequence[str], nbytes: float) -> float:
    """Seconds of one collective over axes of the run's mesh; 0 for nothing."""
    whole = mesh(run)
    topology = GroupTopology.of(run.cluster, whole.shape, [whole.axis_names.index(axis) for axis in axes])
    if topology.ranks == 1 or not nbytes:
        return 0.0
    return float(collective_seconds(kind, nbytes, topology, run.cluster))


def border_bytes(run: TrainingRun) -> float:
    """The activation between two stages, in 16 bits (float32 models: 32)."""
    element = 4 if run.stack.dtype == "float32" else 2
    whole = run.parallel.micro_batch * run.model.seq_len * run.model.hidden * element
    return whole / (run.parallel.tp if run.parallel.sequence_parallel else 1)


def send_seconds(run: TrainingRun, nbytes: float) -> float:
    """From a stage to the next."""
    parallel = run.parallel
    if parallel.pp == 1:
        return 0.0
    return neighbour_seconds(run, nbytes, distance=parallel.tp * parallel.dp * parallel.cp)


def neighbour_seconds(run: TrainingRun, nbytes: float, *, distance: int) -> float:
    """From a rank to the one `distance` further: over the network where they fill whole nodes."""
    crosses = distance >= run.cluster.devices_per_node and run.cluster.num_nodes > 1
    link = run.cluster.inter_link if crosses else run.cluster.intra_link
    return link.latency_seconds + nbytes / link.bytes_per_second


def slowed(compute: float, beside: float, tier: Tier) -> float:
    """Seconds of compute while collectives of `beside` seconds run next to it on the same device."""
    slowdown = 1.0 if tier == "physics" else GALVATRON_OVERLAP.compute
    return compute + (slowdown - 1.0) * min(compute, beside)
