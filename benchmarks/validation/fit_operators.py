"""Fitting the constants of the operator models on published measurements: `operator_curves.json` comes from here.

    python -m benchmarks.validation.fit_operators --data FOLDER              # writes the file
    python -m benchmarks.validation.fit_operators --data FOLDER --leave-out  # prints errors on what is left out

Constants are fitted per machine ("fitted"), and once for all machines together ("shared", each machine counting the
same), which prices devices without measurements. The loss is the mean of |log(predicted / measured)|, cut at 0.6 so
that outliers do not steer, plus a pull towards the start values, so that a constant that the data say nothing about
stays where physics puts it. The search walks along one constant at a time; it is deterministic.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import click
import msgspec
import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.operator_costs import rates_of
from autopar.cost_models.operators_attention import attention_seconds
from autopar.cost_models.operators_gemm import gemm_seconds
from autopar.cost_models.operators_memory import memory_seconds
from autopar.files import write_atomically
from autopar.hardware.device_curves import CURVES_PATH, AttentionCurve, GemmCurve, MemoryCurve, physics_curves
from autopar.hardware.devices import preset_device
from benchmarks.validation.data import folder, read_table
from benchmarks.validation.operator_cases import Attention, Case, Gemm, Memory, case_of
from benchmarks.validation.operators import HOST_FLOOR_SECONDS, host_added_seconds, measured_seconds

Curve: TypeAlias = GemmCurve | MemoryCurve | AttentionCurve
Floats = NDArray[np.float64]
Key: TypeAlias = tuple[str, str]
"""("gemm", "float16"), ("memory", "norm"), ("attention", "backward")."""

FILES = ("op_vidur_linear", "op_neusight_kernels", "op_simumax_a100pcie", "op_simumax_b200", "op_llmcompass",
         "op_deepgemm_h800_fp8")  # fmt: skip

CUT = 0.6
PULL = 0.002
"""Loss of a constant that is e times its start value."""

ROUNDS = 12
MOST_SAMPLES = 320
"""Of one machine and key: of more, evenly chosen ones are fitted."""

FIRST_STEP, SHRINK = 0.25, 0.72

START_GEMM = GemmCurve(
    rate_fraction=1.0, quantisation=0.7, feed=0.1, prologue=64, memory_fraction=0.95, resident_speedup=1.0,
    saturation=0.45, overlap=2.8, split_seconds=3e-6, split_traffic=0.3, launch_seconds=2e-6,
)  # fmt: skip
START_MEMORY = MemoryCurve(
    launch_seconds=2e-6,
    row_seconds=4e-10,
    memory_fraction=0.8,
    resident_speedup=1.3,
    reread_row_bytes=2.5e4,
    reread=0.5,
    unit_bytes_per_cycle=10.0,
)
START_ATTENTION = AttentionCurve(rate_fraction=0.8, softmax_flops=100.0, tail=0.5, launch_seconds=5e-6)

AT_MOST = {"quantisation": 1.0, "rate_fraction": 1.2, "memory_fraction": 1.2, "tail": 1.0, "resident_speedup": 4.0,
           "overlap": 8.0, "saturation": 1.0}  # fmt: skip
AT_LEAST = {"resident_speedup": 0.3, "overlap": 1.0, "memory_fraction": 0.05}

GENERATION_STARTS: Mapping[tuple[str, str], Mapping[str, object]] = {
    ("Ampere", "float32 batched"): {"batched_tiles": ((128, 128),)},
    ("Pascal", "float32 batched"): {"batched_tiles": ((64, 128),)},
    ("Pascal", "float32"): {"window_bytes": 1e8, "window_slowdown": 0.6},
    ("Volta", "float32"): {"window_bytes": 1e8, "window_slowdown": 0.05},
    ("Ampere", "float32"): {"window_bytes": 1e8, "window_slowdown": 0.05},
    ("Blackwell", "forward"): {"rows_per_block": 256},
    ("Blackwell", "backward"): {},
    ("Blackwell", "float16"): {},
    ("Blackwell", "float16 grouped"): {},
    ("CDNA", "float16"): {},
    ("CDNA", "norm"): {},
    ("CDNA", "softmax"): {},
    ("CDNA", "elementwise"): {},
}
"""Kernels that a generation has for itself, and what is known of them: fp32 batches run one tile (names of NeuSight's
kernels); Pascal translates addresses slowly; attention on Blackwell works on two blocks of 128 rows at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Measurements of one machine for one set of constants."""

    case: Case
    group: str
    """Of leave-out: the model, where the file names one."""
    seconds: float


def read_samples(data: Path) -> list[Sample]:
    """Every measurement of one kernel in the dev files."""
    samples = []
    for name in FILES:
        table = read_table(data / "dev" / f"{name}.csv")
        for row in table.rows:
            case = case_of(row, table.schema)
            seconds = measured_seconds(row, case, table.schema)
            samples.append(Sample(case=case, group=row.get("model", ""), seconds=seconds))
    return samples


def key_of(case: Case) -> Key:
    """Which constants a case of one kernel needs."""
    ((_, kernel),) = case.parts
    if isinstance(kernel, Memory):
        return "memory", kernel.family
    if isinstance(kernel, Attention):
        return "attention", "backward" if kernel.backward else "forward"
    units = "float16" if case.dtype == "bfloat16" else case.dtype
    if kernel.grouped and not kernel.fused:
        return "gemm", f"{units} grouped"
    return "gemm", f"{units} batched" if kernel.batch > 1 and not kernel.grouped else units


class Problem:
    """Predicted against measured seconds of one machine and key, as a function of the constants."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        case = samples[0].case
        device = preset_device(case.device)
        units = physics_curves(case.device)
        self.rates = rates_of(device, units, case.dtype)
        self.kernels = [sample.case.parts[0][1] for sample in samples]
        self.measured = np.array([sample.seconds for sample in samples])
        self.host = case.host
        self.added = host_added_seconds(case) if case.host == "added" else 0.0
        self.generation = _generation(case.device)

    def errors(self, curve: Curve, own: bool) -> Floats:
        """log(predicted / measured); `own`: the launch of the constants is that of this machine."""
        seconds = self._kernel_seconds(curve)
        if self.host == "floor":
            seconds = np.maximum(seconds, HOST_FLOOR_SECONDS)
        elif self.host == "added" and not own:
            seconds = seconds + self.added
        return np.asarray(np.log(seconds / self.measured))

    def _kernel_seconds(self, curve: Curve) -> Floats:
        def column(name: str) -> Floats:
            return np.array([float(getattr(kernel, name)) for kernel in self.kernels])

        if isinstance(curve, MemoryCurve):
            element = float(column("element_bytes")[0])
            return memory_seconds(self.rates, curve, column("nbytes"), row=column("row"), element_bytes=element)
        if isinstance(curve, AttentionCurve):
            return attention_seconds(
                self.rates, curve, batch=column("batch"), heads=column("heads"), key_heads=column("key_heads"),
                queries=column("seq"), keys=column("seq"), qk_dim=column("qk_dim"), v_dim=column("v_dim"), causal=True,
                backward=any(getattr(kernel, "backward", False) for kernel in self.kernels),
            )  # fmt: skip
        serial = isinstance(self.kernels[0], Gemm) and self.kernels[0].grouped and not self.kernels[0].fused
        repeats = column("batch") if serial else 1.0
        return repeats * gemm_seconds(
            self.rates, curve, column("m"), column("n"), column("k"), batch=1.0 if serial else column("batch"),
            element_bytes=column("element_bytes"), output_bytes=column("output_bytes"), accumulate=column("accumulate"),
        )  # fmt: skip


def _generation(device: str) -> str:
    generation: str = msgspec.json.decode(CURVES_PATH.read_bytes())["devices"][device]["generation"]
    return generation


def start_of(key: Key, generation: str) -> tuple[Curve, tuple[str, ...]]:
    """Start values and the names of the constants to fit."""
    kind, name = key
    known = GENERATION_STARTS.get((generation, name), {})
    if kind == "memory":
        memory = START_MEMORY
        if name not in ("softmax", "norm"):
            memory = replace(memory, reread_row_bytes=1e18, reread=0.0)
        if name == "elementwise":
            memory = replace(memory, row_seconds=0.0)
        return memory, tuple(field for field in _fields(memory, without=()) if 0 < getattr(memory, field) < 1e18)
    if kind == "attention":
        return replace(START_ATTENTION, **known), ("rate_fraction", "softmax_flops", "tail", "launch_seconds")  # type: ignore[arg-type]
    curve = replace(START_GEMM, **known)  # type: ignore[arg-type]
    window = () if known.get("window_slowdown") else ("window_bytes", "window_slowdown")
    return curve, _fields(curve, without=("batched_tiles", *window))


def _fields(curve: Curve, without: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in curve.__dataclass_fields__ if name not in without)


def fit(problems: Sequence[Problem], start: Curve, names: Sequence[str], own: bool) -> Curve:
    """The constants with the least loss, each machine counting the same; walks along one constant at a time."""

    def loss(curve: Curve) -> float:
        errors = [np.abs(problem.errors(curve, own)) for problem in problems]
        data = np.mean([np.minimum(e, CUT).mean() + 0.3 * np.median(e) for e in errors])
        pulled = sum(np.log(getattr(curve, name) / getattr(start, name)) ** 2 for name in names)
        return float(data + PULL * pulled)

    best, least = start, loss(start)
    steps = dict.fromkeys(names, FIRST_STEP)
    for _ in range(ROUNDS):
        for name in names:
            before = least
            for sign in (1, -1):
                best, least = _walk(best, least, name, sign * steps[name], loss)
            steps[name] *= 1.3 if least < before else SHRINK
    return best


def _walk(curve: Curve, least: float, name: str, step: float, loss: Callable[[Curve], float]) -> tuple[Curve, float]:
    """Multiply one constant by exp(step) as long as the loss falls."""
    while True:
        value = getattr(curve, name) * float(np.exp(step))
        value = min(max(value, AT_LEAST.get(name, 0.0)), AT_MOST.get(name, np.inf))
        candidate = replace(curve, **{name: value})
        found = loss(candidate)
        if found >= least - 1e-6:
            return curve, least
        curve, least = candidate, found


def by_machine(samples: Iterable[Sample]) -> dict[Key, dict[str, list[Sample]]]:
    """Samples by key and machine."""
    found: dict[Key, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        found[key_of(sample.case)][sample.case.machine].append(sample)
    return found


LEAST_SAMPLES = 8
"""Fewer measurements than this are no basis for a machine's own constants."""


def fit_own(samples: Sequence[Sample], start: Curve | None = None) -> Curve:
    """Constants of one machine and key, pulled towards `start` (default: the start of its generation)."""
    problem = Problem(_thinned(samples))
    usual, names = start_of(key_of(samples[0].case), problem.generation)
    if isinstance(usual, MemoryCurve):  # one device cannot tell its units' limit from its memory's
        usual = replace(usual, unit_bytes_per_cycle=0.0)
        names = tuple(name for name in names if name != "unit_bytes_per_cycle")
    return fit([problem], start or usual, names, own=True)


def fit_shared(machines: Mapping[str, Sequence[Sample]], generation: str) -> Curve:
    """Constants of one key for all machines together."""
    problems = [Problem(_thinned(samples)) for samples in machines.values()]
    start, names = start_of(key_of(next(iter(machines.values()))[0].case), generation)
    return fit(problems, start, names, own=False)


def _thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    return samples[:: -(-len(samples) // MOST_SAMPLES)]


def _rounded(curve: Curve) -> dict[str, object]:
    values = msgspec.to_builtins(curve)
    plain = msgspec.to_builtins(type(curve)())
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in values.items()
        if value != plain[name]
    }


def errors_of(samples: Sequence[Sample], curve: Curve, own: bool) -> Floats:
    """|predicted / measured - 1| of each sample."""
    return np.asarray(np.abs(np.expm1(Problem(samples).errors(curve, own))))


def _line(name: str, errors: Floats) -> str:
    return f"{name:58s} n={len(errors):5d}  median {np.median(errors):6.1%}  p90 {np.percentile(errors, 90):6.1%}"


def write_curves(data: Path) -> None:
    """Fit everything and write `operator_curves.json`."""
    content = msgspec.json.decode(CURVES_PATH.read_bytes())
    command = "by python -m benchmarks.validation.fit_operators"
    shared: dict[str, dict[str, object]] = {"gemm": {}, "memory": {}, "attention": {}}
    generations: dict[str, dict[str, dict[str, object]]] = {}
    fitted: dict[str, dict[str, dict[str, object]]] = {}
    for key, machines in by_machine(read_samples(data)).items():
        kind, name = key
        together = fit_shared(machines, "")
        shared[kind][name] = _rounded(together)
        for generation in sorted({Problem(samples).generation for samples in machines.values()}):
            if (generation, name) in GENERATION_STARTS:
                same = {m: s for m, s in machines.items() if Problem(s).generation == generation}
                own = generations.setdefault(generation, {"gemm": {}, "memory": {}, "attention": {}})
                own[kind][name] = _rounded(fit_shared(same, generation))
        for machine, samples in machines.items():
            if len(samples) < LEAST_SAMPLES:
                continue
            curve = fit_own(samples)
            constants = fitted.setdefault(machine, {"gemm": {}, "memory": {}, "attention": {}})
            constants[kind][name] = _rounded(curve)
            click.echo(_line(f"{machine}: {kind} {name}", errors_of(samples, curve, own=True)))
        pooled = np.concatenate([errors_of(samples, together, own=False) for samples in machines.values()])
        click.echo(_line(f"all machines: {kind} {name}", pooled))
    content["shared"] = {**shared, "source": f"fitted across all machines of the dev files {command}"}
    content["generations"] = {
        name: {**constants, "source": f"fitted across all {name} machines of the dev files {command}"}
        for name, constants in generations.items()
    }
    content["fitted"] = {
        name: {**constants, "source": f"fitted on the dev files' measurements of {name} {command}"}
        for name, constants in fitted.items()
    }
    write_atomically(CURVES_PATH, msgspec.json.format(msgspec.json.encode(content, order="sorted"), indent=1) + b"\n")


def leave_out(data: Path) -> None:
    """Print errors on machines (shared constants) and models (a machine's own) that the fit has not seen."""
    for key, machines in by_machine(read_samples(data)).items():
        name = " ".join(key)
        for machine in machines if len(machines) > 1 else ():
            others = {other: samples for other, samples in machines.items() if other != machine}
            generation = Problem(machines[machine]).generation
            same = {other: s for other, s in others.items() if Problem(s).generation == generation}
            special = (generation, key[1]) in GENERATION_STARTS
            curve = fit_shared(same if special and same else others, generation if special else "")
            click.echo(_line(f"without {machine}: {name}", errors_of(machines[machine], curve, own=False)))
        for machine, samples in machines.items():
            for group in sorted({sample.group for sample in samples if sample.group}):
                curve = fit_own([sample for sample in samples if sample.group != group])
                rest = [sample for sample in samples if sample.group == group]
                label = re.sub(r".*/", "", group)
                click.echo(_line(f"{machine} without {label}: {name}", errors_of(rest, curve, own=True)))


@click.command()
@click.option("--data", help="Folder of the measurements (default: $AUTOPAR_GROUNDTRUTH).")
@click.option("--leave-out", "left_out", is_flag=True, help="Print errors on what the fit has not seen; write nothing.")
def main(data: str | None, left_out: bool) -> None:
    """Fit the constants of the operator models."""
    (leave_out if left_out else write_curves)(folder(data))


if __name__ == "__main__":
    main()
