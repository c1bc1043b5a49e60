"""The plan that a published run used, written as constraints of autopar's planner.

    Megatron tensor parallelism          "layers.*.qkv.weight": {"tp": S(0)}, "layers.*.out.weight": {"tp": S(1)}, ...
    sequence parallelism, or without     every activation between the split regions: {"tp": S(1)}, or {"tp": R}
    data parallelism, ZeRO-3             the names of the axes, dp_replicate and dp_shard
    recomputation                        which forward operators of a layer backward runs again

The planner then has no choice left but between spellings of the same program; what it hands back is an ordinary plan,
which is lowered as any other. ZeRO 1 and 2 compute with whole weights, so their micro-batches run the program of plain
data parallelism; that states are cut is a matter of the step's end (`road.py`).

Expert parallelism cuts the dim of experts of the stacked weights over the axis "ep", which also cuts the batch.
Context parallelism has no form in the planner: its runs are refused with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Placement, Replicate, Shard
from autopar.planner.planning import make_plan
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.request import Request
from autopar.rules.engine import is_view
from benchmarks.validation.recomputation import computed_again
from benchmarks.validation.runs import ParallelShape

COLUMNS = (
    "attention.qkv",
    "attention.query_up",
    "attention.kv_up",
    "cross.query",
    "cross.kv",
    "mlp.up",
    "mlp.shared.up",
)
"""Products whose weight (out, in) tensor parallelism cuts along out."""
ROWS = ("attention.out", "cross.out", "mlp.down", "mlp.shared.down")
"""Products whose weight it cuts along in, so that their results are partial sums."""
NO_LIMIT = 1e18
"""Bytes: the published plan ran, so memory does not choose."""


def published_plan(program: Program, cluster: Cluster, parallel: ParallelShape) -> Plan:
    """The plan of one pipeline stage's program at the batch of all data-parallel replicas (micro_batch x dp).

    It names no kernels of ours: a published run ran those of its stack, which `KERNEL_BACKENDS` describes. Raises
    InfeasibleError and ConfigurationError where the model cannot be split so.
    """
    request = Request(
        cluster=subcluster(cluster, parallel.dp * parallel.tp),
        dims=axes_of(parallel),
        optimizer="AdamW",
        memory_limit=NO_LIMIT,
        constraints=tensor_parallel(program, parallel),
        with_baselines=False,
        micro_batches=1,
        kernels=(),
    )
    return with_recomputation(make_plan(program, request), parallel)


def axes_of(parallel: ParallelShape) -> dict[str, int]:
    """Axis names and sizes of a stage, outermost first: tensor parallelism uses the nearest devices."""
    return {data_axis(parallel): parallel.dp, "tp": parallel.tp}


def data_axis(parallel: ParallelShape) -> str:
    """The preset of the planner that data parallelism of this ZeRO stage is."""
    return "dp_shard" if parallel.zero_stage == 3 else "dp_replicate"


def subcluster(cluster: Cluster, devices: int) -> Cluster:
    """The first `devices` of a cluster, as whole nodes."""
    per_node = math.gcd(devices, cluster.devices_per_node)
    return replace(cluster, num_nodes=devices // per_node, devices_per_node=per_node)


def tensor_parallel(program: Program, parallel: ParallelShape) -> Mapping[str, Mapping[str, Placement]]:
    """The constraints of Megatron's splits over the axis "tp"; empty on one device."""
    if parallel.tp == 1:
        return {}
    between = Shard(1) if parallel.sequence_parallel else Replicate()
    found: dict[str, dict[str, Placement]] = {}
    for entry in program.inputs:
        if entry.role == "parameter":
            found[entry.name] = {"tp": weight_placement(entry.name)}
    for node in program.graph.nodes:
        if _is_between(node):
            found[str(node.meta["operator"])] = {"tp": between}
    return found


def weight_placement(name: str) -> Placement:
    """How Megatron stores a parameter over tensor-parallel ranks, by its name in `models.py`."""
    module, _, kind = name.rpartition(".")
    if module in ("embedding.words", "head.output") or module.endswith(COLUMNS):
        return Shard(0)
    if module.endswith(ROWS) and kind == "weight":
        return Shard(1)
    if kind == "gate_up":
        return Shard(2)
    if kind == "down":
        return Shard(1)
    return Replicate()


def _is_between(node: fx.Node) -> bool:
    """Whether an operator's first output is an activation (batch, sequence, hidden) outside of the split regions."""
    if node.op != "call_function" or is_view(node) or "operator" not in node.meta:
        return False
    module = str(node.meta["operator"]).rpartition("/")[0].removesuffix("/bwd").split("/")[0]
    value = node.meta["val"]
    first = value[0] if isinstance(value, tuple | list) else value
    if getattr(first, "ndim", 0) != 3 or first.shape[1] == 1 or str(node.target).startswith("<built-in"):
        return False  # (1, 1, hidden) is the gradient of a norm's weight
    inside_layer = module.startswith("layers.") and module.count(".") == 1
    return inside_layer or module == "embedding" or module.endswith((".norm1", ".norm2", ".norm3", "head.norm"))


def with_recomputation(plan: Plan, parallel: ParallelShape) -> Plan:
    """The plan in which backward of each layer computes again what the run's recomputation says."""
    again = computed_again(plan.operators, parallel)
    if not again:
        return plan
    return plan.with_(
        operators={
            name: replace(operator, recompute=True) if name in again else operator
            for name, operator in plan.operators.items()
        }
    )
