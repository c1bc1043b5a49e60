"""Seconds of one collective, per backend, with what the backend really sends.

`collective_seconds` is the one entry for planner, simulator and validation. S counts the bytes of the full logical
buffer: all-gather output, reduce-scatter input, all-reduce buffer, all-to-all local send total, edges that one rank
sends to its neighbours. A group of n ranks lies on k nodes; sibling groups that run at the same time share the NICs.

    cluster = Cluster.parse("2x8 H100-SXM")
    topology = GroupTopology.of(cluster, (2, 8), (1,))
    collective_seconds("all_gather", 2**30, topology, cluster)      # 3.1e-3: inside the nodes, over NVSwitch

Backends: `nccl.py` (on `nccl_tuner.py`) and `gloo.py`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cost_models.gloo import gloo_seconds
from autopar.cost_models.nccl import nccl_seconds
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology

CollectiveKind: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "neighbours"
]
Seconds: TypeAlias = NDArray[np.float64]


def collective_seconds(kind: CollectiveKind, nbytes: ArrayLike, topology: GroupTopology, cluster: Cluster) -> Seconds:
    """Seconds of one collective with all sibling groups running it at the same time; same shape as `nbytes`.

    `nbytes` counts the full logical buffer of one group. 0 for one rank and for empty buffers.
    """
    sizes = np.asarray(nbytes, dtype=np.float64)
    if topology.ranks == 1:
        return np.zeros_like(sizes)
    backend = nccl_seconds if cluster.collective_backend == "nccl" else gloo_seconds
    return np.where(sizes > 0, backend(kind, sizes, topology, cluster), 0.0)
