"""A published run through autopar's own road: lowered program -> seconds of every stage -> schedule -> seconds a step.

    lowered(run)         the program of one rank, one layer of each kind            (lowered.py)
    segment_passes(run)  its kernels and collectives, summed per segment and pass   (cost_models/program_costs.py)
    stage_costs(run)     StageCosts of every model chunk                            (here, step_end.py)
    step_seconds(run)    the schedule of the run played with them                   (here)

What a stack does beyond the program of a micro-batch: the host that launches kernels (hosts.py), gathers that run
beside compute, exchanges of experts (experts.py), parts of attention (attended.py), casts (quantization.py), the
step's end.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.program_costs import COMPUTE, ProgramAction, program_actions
from autopar.cost_models.schedule_player import play_pipeline, schedule_for
from autopar.cost_models.stage_costs import StageCosts
from autopar.hardware.device_curves import DeviceCurves, device_curves, has_curves, physics_curves, shared_curves
from autopar.hardware.devices import Device
from autopar.passes.module_segments import segment_of
from benchmarks.validation.adapters import with_adapters
from benchmarks.validation.attended import attention_seconds
from benchmarks.validation.experts import exchange_seconds
from benchmarks.validation.hosts import Host, host_of
from benchmarks.validation.links import border_bytes, collective, send_seconds, slowed
from benchmarks.validation.lowered import LoweredRun, captured_part, chunks, lowered
from benchmarks.validation.models import layer_kinds
from benchmarks.validation.published_plan import data_axis
from benchmarks.validation.quantization import narrowed
from benchmarks.validation.runs import Stack, TrainingRun
from benchmarks.validation.schemas import Tier
from benchmarks.validation.step_end import step_end_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One segment in one direction, for one micro-batch, in seconds."""

    kernels: tuple[float, ...]
    collectives: tuple[float, ...]
    """Those that compute waits for (tensor parallelism)."""
    exchanges: float
    """All-to-alls of expert parallelism."""
    expert_layers: int
    """1 for a layer of experts."""
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
    costs = play_pipeline(stages, schedule, send_seconds=send, blocking=blocking, step_end="together")
    host = host_of(run, tier)
    return costs.step_seconds + host.step_seconds + parallel.micro_batches * host.batch_seconds


def stage_costs(run: TrainingRun, tier: Tier) -> list[StageCosts]:
    """Seconds of every model chunk, in model order; bytes are those handed on, the rest is left 0."""
    segments = segment_costs(run, tier)
    return [_chunk_costs(run, chunk, segments, tier) for chunk in chunks(run)]


def _chunk_costs(
    run: TrainingRun, chunk: Sequence[str], segments: Mapping[str, SegmentCosts], tier: Tier
) -> StageCosts:
    forward = _pass_seconds(run, [segments[name].forward for name in chunk], tier)
    backward = _pass_seconds(run, [segments[name].backward for name in reversed(chunk)], tier)
    elements = 0 if run.adapter_rank else sum(segments[name].parameter_elements for name in chunk)
    weight = 0.0
    if run.parallel.schedule.startswith("zb"):
        weight = sum(segments[name].backward.weight_compute for name in chunk)
    return StageCosts(
        forward_seconds=forward,
        backward_seconds=backward - weight,
        weight_seconds=weight,
        send_bytes=border_bytes(run),
        once_seconds=step_end_seconds(run, chunk, elements, backward, tier) if run.training else 0.0,
    )


def _pass_seconds(run: TrainingRun, passes: Sequence[Pass], tier: Tier) -> float:
    """Consecutive segments: what the device computes or the host launches, whichever is longer; gathers run beside the
    segment before, or not. Collectives of tensor parallelism that a stack cuts into one piece per rank run beside the
    products but for one piece."""
    host = host_of(run, tier)
    busy = _busy_seconds(run, passes, host, tier)
    if host.runs_ahead:
        busy = max(busy, launch_seconds(host, passes))
    gathers = sum(p.gathers for p in passes)
    if run.stack.overlap_parameters and gathers:
        busy = slowed(busy, gathers, tier)
        return max(busy, gathers) + min(p.gathers for p in passes if p.gathers)
    return busy + gathers


def _busy_seconds(run: TrainingRun, passes: Sequence[Pass], host: Host, tier: Tier) -> float:
    """Of the device in consecutive segments, without gathers."""
    kernel, start = (0.0, 0.0) if host.runs_ahead else (host.kernel_seconds, host.collective_seconds)
    compute = sum(max(kernel, seconds) for p in passes for seconds in p.kernels)
    waited = sum(max(start, seconds) for p in passes for seconds in p.collectives)
    if run.stack.overlap_tensor:
        compute = max(slowed(compute, waited, tier), waited)
        waited /= run.parallel.tp
    busy, exchanges = compute + waited, sum(p.exchanges for p in passes)
    return max(slowed(busy, exchanges, tier), exchanges) if run.stack.overlap_exchanges else busy + exchanges


def launch_seconds(host: Host, passes: Sequence[Pass]) -> float:
    """What a host takes for consecutive segments of one pass."""
    return host.pass_seconds + sum(
        len(p.kernels) * host.kernel_seconds
        + len(p.collectives) * host.collective_seconds
        + p.expert_layers * host.experts_seconds
        for p in passes
    )


def segment_costs(run: TrainingRun, tier: Tier) -> Mapping[str, SegmentCosts]:
    """Segment -> its costs on one device for one micro-batch."""
    return _segment_costs(_Run(run, tier))


class _Run:
    """A run as a key: all that its segments depend on."""

    def __init__(self, run: TrainingRun, tier: Tier) -> None:
        self.run, self.tier = run, tier
        parallel = replace(run.parallel, micro_batches=1, virtual_stages=1, schedule="1f1b")
        part = captured_part(run)
        self._key = (part, parallel, run.stack, run.cluster.fingerprint, run.adapter_rank, tier)

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
    prices, found = kernel_prices(run, tier), []
    for phase, module in (("forward", low.partition.forward), ("backward", low.partition.backward)):
        if module is None:
            continue
        actions = functools.partial(
            program_actions,
            module.graph,
            phase,
            cluster=run.cluster,
            mesh=low.mesh,
            backend=kernel_backend(run.stack),
            segment_of=segment_of,
            parameters=parameters,
        )
        if prices.product_dtype is None:
            found += actions(prices=prices)
            continue
        wide = actions(prices=replace(prices, product_dtype=None))
        rate = run.cluster.device.memory_bytes_per_second
        found += narrowed(actions(prices=prices), wide, run.stack, rate)
    return found


def kernel_prices(run: TrainingRun, tier: Tier) -> KernelPrices:
    """What prices the kernels of a run: constants of the device as far as the tier allows, ceilings alone where its
    units are unknown."""
    device = run.cluster.device
    return KernelPrices(
        device=replace(device, curves=_curves(device, tier), profile=None),
        product_dtype=_PRODUCT_DTYPES.get(run.stack.dtype),
        gradient_bytes=run.stack.gradient_bytes if run.stack.name.startswith("megatron") else 0,
        attention=run.stack.attention_kernel,
    )


def _curves(device: Device, tier: Tier) -> DeviceCurves | None:
    if not has_curves(device.name):
        return None
    if tier == "physics":
        return physics_curves(device.name, device.launch_seconds)
    return shared_curves(device.name) if tier == "t0" else device_curves(device.name)


_PRODUCT_DTYPES = {"float8": "float8_e4m3fn", "float4": "float4_e2m1fn_x2"}
"""The dtype of matrix products where it is not that of the graph."""


def kernel_backend(stack: Stack) -> str:
    """Who groups kernels (`graphs.kernel_groups`)."""
    return "torch" if stack.kernels == "eager" else stack.kernels


def _summed(run: TrainingRun, actions: Sequence[ProgramAction], segment: str) -> Pass:
    data = data_axis(run.parallel)
    compute = [a for a in actions if a.stream == COMPUTE]
    gathered = sum(
        a.nbytes for a in actions if a.moves_parameter and a.kind == "all_gather" and data in a.stream.split("+")
    )
    exposed = [a for a in actions if a.stream == "tp" and not a.moves_parameter]
    backward = bool(actions) and actions[0].phase == "backward"
    if run.adapter_rank:
        compute = [with_adapters(run, action) for action in compute if not (backward and action.weight_only)]
    has_experts = _has_experts(run, segment)
    return Pass(
        kernels=tuple(attention_seconds(run, a) if "attention" in a.kind else a.seconds for a in compute),
        collectives=tuple(a.seconds for a in exposed),
        exchanges=exchange_seconds(run, backward) if has_experts else 0.0,
        expert_layers=int(has_experts),
        gathers=collective(run, "all_gather", (data,), gathered * run.stack.gather_bytes / 2),
        weight_compute=sum(a.seconds for a in compute if a.weight_only),
    )


def _has_experts(run: TrainingRun, segment: str) -> bool:
    kinds = [kind for kind, _ in layer_kinds(run.model)]
    return segment in {f"layers.{index}" for index, kind in enumerate(kinds) if kind == "experts"}
