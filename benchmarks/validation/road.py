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
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import GroupTopology
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.pipeline import play_pipeline, schedule_for
from autopar.cost_models.program_costs import COMPUTE, ProgramAction, program_actions
from autopar.cost_models.simulator import GALVATRON_OVERLAP
from autopar.cost_models.stage_costs import StageCosts
from autopar.device_curves import device_curves, has_curves, physics_curves, shared_curves
from autopar.passes.segments import segment_of
from benchmarks.validation.lowered import LoweredRun, captured_part, chunks, lowered, mesh
from benchmarks.validation.models import layer_kinds
from benchmarks.validation.published_plan import data_axis
from benchmarks.validation.runs import Stack, TrainingRun
from benchmarks.validation.schemas import Tier

HOST_SECONDS = {"megatron-deepspeed": 62e-6, "megatron": 25e-6, "default": 15e-6}
"""Time between two kernels that the host of a stack launches, per kernel of our graph: Python, autograd, checks and
the small kernels that no graph shows. megatron-deepspeed: fitted on every 12th row of e2e_vtrain_a100_single; on every
7th, 62-64 us are best where one size of tp, pp, dp or micro-batch is left out, 54 us from the compute-bound width of
2048 alone. megatron: chosen on e2e_mem_simumax_b200, whose eight-way split layers 62 us would make up to half too slow.
Others: assumption, eager PyTorch takes 10-20 us."""

HOST_COLLECTIVE_SECONDS = 50e-6
"""The same of one collective; fitted on the same rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One segment in one direction, for one micro-batch, in seconds."""

    kernels: tuple[float, ...]
    collectives: tuple[float, ...]
    """Those that compute waits for (tensor parallelism)."""
    exchanges: float
    """All-to-alls of expert parallelism."""
    gathers: float
    """Of parameters (ZeRO-3)."""
    weight_compute: float
    """Kernels on which only gradients of weights depend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCosts:
    forward: Pass
    backward: Pass
    parameter_elements: int
    """Of one model-parallel rank, before data parallelism cuts them."""


def step_seconds(run: TrainingRun, tier: Tier) -> float:
    """Seconds of one training step. Raises ConfigurationError where the run cannot be expressed."""
    stages, parallel = stage_costs(run, tier), run.parallel
    if not run.training:
        return sum(stage.forward_seconds for stage in stages) * parallel.micro_batches
    send = send_seconds(run, stages[0].send_bytes)
    family = parallel.schedule if parallel.pp > 1 else "1f1b"
    if parallel.virtual_stages > 1 and family == "1f1b":
        family = "interleaved"
    schedule = schedule_for(family, stages, parallel.pp, parallel.micro_batches, send)
    blocking = run.stack.name.startswith("megatron")
    return play_pipeline(stages, schedule, send_seconds=send, blocking=blocking, step_end="together").step_seconds


def stage_costs(run: TrainingRun, tier: Tier) -> list[StageCosts]:
    """Seconds of every model chunk, in model order; bytes are those handed on, the rest is left 0."""
    segments = segment_costs(run, tier)
    return [_chunk_costs(run, chunk, segments, tier) for chunk in chunks(run)]


def _chunk_costs(
    run: TrainingRun, chunk: Sequence[str], segments: Mapping[str, SegmentCosts], tier: Tier
) -> StageCosts:
    forward = _pass_seconds(run, [segments[name].forward for name in chunk], tier)
    backward = _pass_seconds(run, [segments[name].backward for name in reversed(chunk)], tier)
    weight = 0.0
    if run.parallel.schedule.startswith("zb"):
        weight = sum(segments[name].backward.weight_compute for name in chunk)
    return StageCosts(
        forward_seconds=forward,
        backward_seconds=backward - weight,
        weight_seconds=weight,
        send_bytes=border_bytes(run),
        once_seconds=_once_seconds(run, chunk, segments, backward, tier) if run.training else 0.0,
    )


def host_seconds(stack: Stack, tier: Tier) -> tuple[float, float]:
    """Least seconds of a kernel and of a collective: what their launch takes; 0 where a graph launches them all, and in
    the ablation, which knows no fitted constant."""
    if tier == "physics" or stack.cuda_graph:
        return 0.0, 0.0
    return HOST_SECONDS.get(stack.name, HOST_SECONDS["default"]), HOST_COLLECTIVE_SECONDS


def _pass_seconds(run: TrainingRun, passes: Sequence[Pass], tier: Tier) -> float:
    """Consecutive segments: every kernel takes its own time or that of its launch, whichever is longer; gathers run
    beside the segment before, or not. Collectives of tensor parallelism that a stack cuts into one piece per rank run
    beside the products but for one piece."""
    gathers = sum(p.gathers for p in passes)
    kernel, collective_start = host_seconds(run.stack, tier)
    compute = sum(max(kernel, seconds) for p in passes for seconds in p.kernels)
    waited = sum(max(collective_start, seconds) for p in passes for seconds in p.collectives)
    if run.stack.overlap_tensor:
        compute = max(slowed(compute, waited, tier), waited)
        waited /= run.parallel.tp
    busy = compute + waited + sum(p.exchanges for p in passes)
    if run.stack.overlap_parameters and gathers:
        busy = slowed(busy, gathers, tier)
        return max(busy, gathers) + min(p.gathers for p in passes if p.gathers)
    return busy + gathers


def slowed(compute: float, beside: float, tier: Tier) -> float:
    """Seconds of compute while collectives of `beside` seconds run next to it on the same device."""
    slowdown = 1.0 if tier == "physics" else GALVATRON_OVERLAP.compute
    return compute + (slowdown - 1.0) * min(compute, beside)


def segment_costs(run: TrainingRun, tier: Tier) -> Mapping[str, SegmentCosts]:
    """Segment -> its costs on one device for one micro-batch."""
    return _segment_costs(_Run(run, tier))


class _Run:
    """A run as a key: all that its segments depend on."""

    def __init__(self, run: TrainingRun, tier: Tier) -> None:
        self.run, self.tier = run, tier
        parallel = replace(run.parallel, micro_batches=1, virtual_stages=1, schedule="1f1b")
        part = captured_part(run)
        self._key = (part, parallel, run.stack, run.cluster.fingerprint, tier)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Run) and self._key == other._key


@functools.lru_cache(maxsize=4096)
def _segment_costs(key: _Run) -> Mapping[str, SegmentCosts]:
    run, low = key.run, lowered(key.run)
    by_segment: dict[str, list[ProgramAction]] = {}
    for action in run_actions(run, low, key.tier):
        by_segment.setdefault(segment_of(action.name), []).append(action)
    elements: Counter[str] = Counter()
    for entry in low.program.inputs:
        if entry.role == "parameter":
            elements[segment_of(entry.name)] += math.prod(entry.shape)
    stored_parts = low.plan.mesh.shape[0] if run.parallel.zero_stage == 3 else 1
    return {
        name: SegmentCosts(
            forward=_summed(run, [a for a in found if a.phase == "forward"], name),
            backward=_summed(run, [a for a in found if a.phase == "backward"], name),
            parameter_elements=elements[name] * stored_parts,
        )
        for name, found in by_segment.items()
    }


def run_actions(run: TrainingRun, low: LoweredRun, tier: Tier) -> list[ProgramAction]:
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
                prices=kernel_prices(run, tier),
                segment_of=segment_of,
                parameters=parameters,
            )
    return found


def kernel_prices(run: TrainingRun, tier: Tier) -> KernelPrices:
    """What prices the kernels of a run: constants of the device as far as the tier allows, ceilings alone where its
    units are unknown."""
    device = run.cluster.device
    curves = None
    if has_curves(device.name):
        curves = {"t0": shared_curves, "t1": device_curves, "physics": physics_curves}[tier](device.name)
    return KernelPrices(
        device=device,
        curves=curves,
        product_dtype=_PRODUCT_DTYPES.get(run.stack.dtype),
        gradient_bytes=run.stack.gradient_bytes if run.stack.name.startswith("megatron") else 0,
        attention=run.stack.attention_kernel,
    )


_PRODUCT_DTYPES = {"float8": "float8_e4m3fn", "float4": "float4_e2m1fn_x2"}
"""The dtype of matrix products where it is not that of the graph."""


def kernel_backend(stack: Stack) -> str:
    """Who groups kernels (`cost_models.kernel_groups`)."""
    return "torch" if stack.kernels == "eager" else stack.kernels


def _summed(run: TrainingRun, actions: Sequence[ProgramAction], segment: str) -> Pass:
    data, parallel = data_axis(run.parallel), run.parallel
    compute = [a for a in actions if a.stream == COMPUTE]
    gathered = sum(
        a.nbytes for a in actions if a.moves_parameter and a.kind == "all_gather" and data in a.stream.split("+")
    )
    exposed = [a for a in actions if a.stream == "tp" and not a.moves_parameter]
    # a rank of context parallelism holds a part of the queries and meets all keys: the graph counts its own only
    shares = [parallel.cp if "attention" in a.kind else 1 for a in compute]
    return Pass(
        kernels=tuple(a.seconds * share for a, share in zip(compute, shares, strict=True)),
        collectives=tuple(a.seconds for a in exposed),
        exchanges=_exchanges(run, segment, bool(actions) and actions[0].phase == "backward"),
        gathers=collective(run, "all_gather", (data,), gathered * run.stack.gather_bytes / 2),
        weight_compute=sum(a.seconds for a in compute if a.weight_only),
    )


def _exchanges(run: TrainingRun, segment: str, backward: bool) -> float:
    """Seconds of the all-to-alls of expert parallelism in one layer and pass, which the lowered program does not hold:
    every chosen row goes to its expert and back, in forward and again in backward (twice where that recomputes)."""
    parallel, experts = run.parallel, run.model.experts
    kinds = [kind for kind, _ in layer_kinds(run.model)]
    if (
        experts is None
        or parallel.ep == 1
        or segment not in {f"layers.{i}" for i, k in enumerate(kinds) if k == "experts"}
    ):
        return 0.0
    rows = parallel.micro_batch * run.model.seq_len // parallel.cp * experts.per_token
    nbytes = rows * run.model.hidden * 2.0 / parallel.tp
    ranks = run.cluster.num_devices
    shape = (max(1, ranks // (parallel.ep * parallel.tp)), parallel.ep, parallel.tp)
    if math.prod(shape) > ranks:
        return 0.0
    topology = GroupTopology.of(run.cluster, shape, (1,))
    times = 2 * (2 if backward and parallel.recompute == "full" else 1)
    return times * float(collective_seconds("all_to_all", nbytes, topology, run.cluster))


def collective(run: TrainingRun, kind: str, axes: Sequence[str], nbytes: float) -> float:
    """Seconds of one collective over axes of the run's mesh; 0 for nothing."""
    whole = mesh(run)
    topology = GroupTopology.of(run.cluster, whole.shape, [whole.axis_names.index(axis) for axis in axes])
    if topology.ranks == 1 or not nbytes:
        return 0.0
    return float(collective_seconds(kind, nbytes, topology, run.cluster))  # type: ignore[arg-type]


def _once_seconds(
    run: TrainingRun, chunk: Sequence[str], segments: Mapping[str, SegmentCosts], backward: float, tier: Tier
) -> float:
    """The end of a step on one device: gradients of all its layers reduced, their norm, the optimizer."""
    stack, parallel = run.stack, run.parallel
    data = data_axis(parallel)
    elements = sum(segments[name].parameter_elements for name in chunk)
    replicas = parallel.dp * parallel.cp
    kind = "reduce_scatter" if parallel.zero_stage else "all_reduce"
    reduction = collective(run, kind, (data,), elements * stack.reduce_bytes)
    gather = 0.0
    if parallel.zero_stage in (1, 2):
        gather = collective(run, "all_gather", (data,), elements * stack.gather_bytes)
    passes = parallel.micro_batches if parallel.zero_stage == 3 else 1
    reduction *= passes
    if stack.overlap_gradients:
        beside = slowed(backward, reduction / passes, tier) - backward
        left = max(reduction - backward * passes, reduction / max(len(chunk), 1) / passes)
        reduction = left + beside * passes
    if stack.overlap_parameters:
        gather /= max(len(chunk), 1)
    updated = elements / ((parallel.zero_degree or replicas) if parallel.zero_stage else 1)
    return reduction + gather + optimizer_seconds(run, updated)


def optimizer_seconds(run: TrainingRun, elements: float) -> float:
    """Norm and Adam's step are bounded by memory: gradients are read twice and zeroed, states and weights rewritten."""
    stack = run.stack
    if not stack.optimizer_bytes:
        return 0.0
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
