"""A published run through autopar's own road: lowered program -> seconds of every stage -> schedule -> seconds a step.

    lowered(run)         the program of one rank, one layer of each kind            (lowered.py)
    segment_passes(run)  its kernels and collectives, summed per segment and pass   (cost_models/program_costs.py)
    stage_costs(run)     StageCosts of every model chunk                            (here)
    step_seconds(run)    the schedule of the run played with them                   (here)

What a stack does beyond the program of a micro-batch stands here: the host that launches kernels one by one, gathers
and reductions that run beside compute, and the step's end: gradient reduction, norm, optimizer.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cluster import GroupTopology
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.program_costs import COMPUTE, ProgramAction, program_actions
from autopar.cost_models.stage_costs import StageCosts
from autopar.passes.segments import segment_of
from autopar.schedules.check import runnable_order
from autopar.schedules.actions import producer
from autopar.schedules.list_scheduler import build_schedule
from benchmarks.validation.lowered import PIPELINE_AXIS, LoweredRun, lowered
from benchmarks.validation.published_plan import data_axis
from benchmarks.validation.runs import Stack, TrainingRun

__all__ = ["lowered", "stage_costs", "step_seconds"]

HOST_SECONDS = {"forward": 14e-6, "backward": 9e-6}
"""Time in which the host launches one kernel: Python modules in forward, C++ autograd in backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One segment in one direction, for one micro-batch, in seconds."""

    compute: float
    launches: int
    exposed: float
    """Collectives that compute waits for (tensor parallelism)."""
    gathers: float
    """Of parameters (ZeRO-3)."""
    weight_compute: float
    """The part of `compute` on which only gradients of weights depend."""
    gather_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCosts:
    forward: Pass
    backward: Pass
    parameter_elements: int
    """Local, as stored."""
    gradient_elements: float
    """Local elements of the gradients that data parallelism reduces."""


def step_seconds(run: TrainingRun, tier: str) -> float:
    """Seconds of one training step. Raises ConfigurationError where the run cannot be expressed."""
    stages = stage_costs(run, tier)
    parallel = run.parallel
    family = parallel.schedule if parallel.pp > 1 else "1f1b"
    send = send_seconds(run, stages[0].send_bytes)
    return played(family, stages, parallel.pp, parallel.micro_batches, send)


def played(family: str, stages: Sequence[StageCosts], ranks: int, micro_batches: int, send: float) -> float:
    schedule = build_schedule(family, ranks, micro_batches, len(stages) // ranks)
    ends: dict[tuple[int, str, int], float] = {}
    free = [0.0] * ranks
    for rank, action in runnable_order(schedule):
        costs = stages[action.stage]
        needed = producer(action, schedule.num_stages)
        start = free[rank]
        if needed is not None:
            arrived = ends[(*needed, action.micro_batch)]
            start = max(start, arrived + (send if needed[0] != action.stage else 0.0))
        seconds = {
            "F": costs.forward_seconds,
            "B": costs.backward_seconds + costs.weight_seconds,
            "I": costs.backward_seconds,
            "W": costs.weight_seconds,
        }[action.kind]
        free[rank] = start + seconds
        if action.kind != "W":
            ends[action.stage, "F" if action.kind == "F" else "gradient", action.micro_batch] = free[rank]
    return max(free[s % ranks] + sum(c.once_seconds for c in stages[s % ranks :: ranks]) for s in range(ranks))


def stage_costs(run: TrainingRun, tier: str) -> list[StageCosts]:
    """Seconds of every model chunk, in model order; bytes are those handed on, the rest is left 0."""
    low = lowered(run)
    segments = segment_costs(run)
    return [_chunk_costs(run, low, chunk, segments) for chunk in low.chunks]


def _chunk_costs(
    run: TrainingRun, low: LoweredRun, chunk: Sequence[str], segments: dict[str, SegmentCosts]
) -> StageCosts:
    forward = _pass_seconds(run, [segments[name].forward for name in chunk], "forward")
    backward = _pass_seconds(run, [segments[name].backward for name in reversed(chunk)], "backward")
    weight = 0.0
    if run.parallel.schedule.startswith("zb"):
        weight = sum(segments[name].backward.weight_compute for name in chunk)
    return StageCosts(
        forward_seconds=forward,
        backward_seconds=backward - weight,
        weight_seconds=weight,
        send_bytes=border_bytes(run),
        once_seconds=_once_seconds(run, low, chunk, segments, backward),
    )


def _pass_seconds(run: TrainingRun, passes: Sequence[Pass], phase: str) -> float:
    """Consecutive segments: the host or the device is the slower one; gathers beside the segment before, or not."""
    device = sum(p.compute + p.exposed for p in passes)
    host = 0.0 if run.stack.cuda_graph else sum(p.launches for p in passes) * HOST_SECONDS[phase]
    gathers = sum(p.gathers for p in passes)
    busy = max(device, host)
    if run.stack.overlap_parameters and gathers:
        return max(busy, gathers) + min(p.gathers for p in passes if p.gathers)
    return busy + gathers


def segment_costs(run: TrainingRun) -> dict[str, SegmentCosts]:
    """Segment -> its costs on one device for one micro-batch."""
    return _segment_costs(_Run(run))


@dataclass(frozen=True, slots=True)
class _Run:
    """A run as a key: all that its segments depend on."""

    run: TrainingRun

    def _key(self) -> tuple[object, ...]:
        low = lowered(self.run)
        return id(low.partition), self.run.cluster.fingerprint, self.run.stack, low.mesh

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Run) and self._key() == other._key()


@functools.lru_cache(maxsize=4096)
def _segment_costs(key: _Run) -> dict[str, SegmentCosts]:
    run, low = key.run, lowered(key.run)
    actions = run_actions(run, low)
    elements: Counter[str] = Counter()
    for entry in low.program.inputs:
        if entry.role == "parameter":
            size = 1
            for dim in entry.shape:
                size *= dim
            elements[segment_of(entry.name)] += size
    return {
        name: SegmentCosts(
            forward=_summed(run, low, [a for a in found if a.phase == "forward"]),
            backward=_summed(run, low, [a for a in found if a.phase == "backward"]),
            parameter_elements=elements[name],
            gradient_elements=sum(
                a.nbytes / a.dtype_bytes for a in found if _reduces_gradient(a, low) and a.dtype_bytes
            ),
        )
        for name in dict.fromkeys(name for chunk in low.chunks for name in chunk)
        for found in [[a for a in actions if segment_of(a.name) == name]]
    }


def run_actions(run: TrainingRun, low: LoweredRun) -> list[ProgramAction]:
    """Everything that rank 0 runs for one micro-batch, each segment once."""
    parameters = frozenset(e.name for e in low.program.inputs if e.role == "parameter")
    partition, found = low.partition, []
    for phase, module in (("forward", partition.forward), ("backward", partition.backward)):
        if module is not None:
            found += program_actions(
                module.graph,
                phase,
                cluster=run.cluster,
                mesh=low.mesh,
                backend=kernel_backend(run.stack),
                segment_of=segment_of,
                dtype=product_dtype(run.stack),
                parameters=parameters,
            )
    return found


def kernel_backend(stack: Stack) -> str:
    """Who groups kernels (`cost_models.kernel_groups`)."""
    return "torch" if stack.kernels == "eager" else stack.kernels


def product_dtype(stack: Stack) -> str | None:
    """The dtype of matrix products where it is not that of the graph."""
    return {"float8": "float8_e4m3fn", "float4": "float4_e2m1fn"}.get(stack.dtype)


def _reduces_gradient(action: ProgramAction, low: LoweredRun) -> bool:
    """Whether data parallelism sums a gradient here: once per step where gradients accumulate."""
    return action.moves_parameter and action.phase == "backward" and action.kind in ("all_reduce", "reduce_scatter")


def _summed(run: TrainingRun, low: LoweredRun, actions: Sequence[ProgramAction]) -> Pass:
    data = data_axis(run.parallel)
    compute = [a for a in actions if a.stream == COMPUTE]
    gathers = [a for a in actions if a.moves_parameter and a.kind == "all_gather" and data in a.stream.split("+")]
    gathered = sum(a.nbytes for a in gathers)
    exposed = [a for a in actions if a.stream == "tp" and not a.moves_parameter]
    return Pass(
        compute=sum(a.seconds for a in compute),
        launches=sum(a.launches for a in compute),
        exposed=sum(a.seconds for a in exposed),
        gathers=collective(run, low, "all_gather", (data,), gathered),
        weight_compute=sum(a.seconds for a in compute if a.weight_only),
        gather_bytes=gathered,
    )


def collective(run: TrainingRun, low: LoweredRun, kind: str, axes: Sequence[str], nbytes: float) -> float:
    """Seconds of one collective over axes of the run's mesh; 0 for nothing."""
    topology = GroupTopology.of(run.cluster, low.mesh.shape, [low.mesh.axis_names.index(axis) for axis in axes])
    if topology.ranks == 1 or not nbytes:
        return 0.0
    return float(collective_seconds(kind, nbytes, topology, run.cluster))  # type: ignore[arg-type]


def _once_seconds(
    run: TrainingRun, low: LoweredRun, chunk: Sequence[str], segments: dict[str, SegmentCosts], backward: float
) -> float:
    """The end of a step on one device: gradients of all its layers reduced, their norm, the optimizer."""
    stack, parallel = run.stack, run.parallel
    data = data_axis(parallel)
    gradients = sum(segments[name].gradient_elements for name in chunk)
    own = sum(segments[name].parameter_elements for name in chunk)
    if parallel.zero_stage in (1, 2):
        reduction = collective(run, low, "reduce_scatter", (data,), gradients * stack.reduce_bytes)
        gather = collective(run, low, "all_gather", (data,), gradients * stack.gather_bytes)
        updated = own / (parallel.zero_degree or parallel.dp)
    else:
        kind = "reduce_scatter" if parallel.zero_stage == 3 else "all_reduce"
        reduction, gather = collective(run, low, kind, (data,), gradients * stack.reduce_bytes), 0.0
        updated = own
    if parallel.zero_stage == 3:
        reduction *= parallel.micro_batches
    if stack.overlap_gradients:
        hidden = backward * (parallel.micro_batches if parallel.zero_stage == 3 else 1)
        reduction = max(reduction - hidden, reduction / max(len(chunk), 1))
    if stack.overlap_parameters:
        gather /= max(len(chunk), 1)
    return reduction + gather + optimizer_seconds(run, updated)


def optimizer_seconds(run: TrainingRun, elements: float) -> float:
    """Norm and Adam's step are bounded by memory: gradients are read twice and zeroed, states and weights rewritten."""
    stack = run.stack
    traffic = 3 * stack.gradient_bytes + 2 * stack.optimizer_bytes + stack.parameter_bytes
    return elements * traffic / run.cluster.device.memory_bytes_per_second


def border_bytes(run: TrainingRun) -> float:
    """The activation between two stages, in 16 bits (float32 models: 32)."""
    element = 4 if run.stack.dtype == "float32" else 2
    whole = run.parallel.micro_batch * run.model.seq_len * run.model.hidden * element
    return whole / (run.parallel.tp if run.parallel.sequence_parallel else 1)


def send_seconds(run: TrainingRun, nbytes: float) -> float:
    """From a stage to the next: over the network where a stage fills whole nodes."""
    parallel = run.parallel
    if parallel.pp == 1:
        return 0.0
    stage = parallel.tp * parallel.dp * parallel.cp
    crosses = stage >= run.cluster.devices_per_node and run.cluster.num_nodes > 1
    link = run.cluster.inter_link if crosses else run.cluster.intra_link
    return link.latency_seconds + nbytes / link.bytes_per_second
