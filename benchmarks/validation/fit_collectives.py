"""Fitting the traits of links on published sweeps, and how far the fit holds for sweeps that it has not seen.

    python -m benchmarks.validation.fit_collectives --data FOLDER

prints, per link of `TARGETS`, the fitted numbers (they are kept in `cost_models/hardware/links.json` and in
`collective_profiles.json`), the median error on the sweeps fitted, and the median error on each machine and each
number of ranks when the fit leaves it out. A fit minimises the mean over the three bins of sizes of the mean
|log(predicted / measured)|, by a pattern search over the logarithms of its few numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.collective_costs import CollectiveKind, collective_seconds
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from benchmarks.validation.collectives import Question, bus_factor, cluster_of, question_of
from benchmarks.validation.data import folder, read_table
from benchmarks.validation.schemas import Tier

Floats = NDArray[np.float64]
BINS = ((0.0, 256 * 2.0**10), (256 * 2.0**10, 16 * 2.0**20 + 1), (16 * 2.0**20 + 1, math.inf))
"""Small, mid and large buffers."""
TRAITS = frozenset(
    ("startup_seconds", "ramp_seconds", "pass_seconds_per_byte", "multicast_fraction", "ramp_bytes", "ll128_efficiency")
)
Values = Mapping[str, float]
STARTS: Values = {
    # where no preset that was fitted already may help: a number that the sweeps say nothing of stays here
    "startup_seconds": 2e-5,
    "ramp_seconds": 1e-6,
    "ramp_bytes": 1e6,
    "pass_seconds_per_byte": 1e-12,
    "multicast_fraction": 0.5,
    "ll128_efficiency": 0.92,
    "latency_seconds": 2e-5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Measured seconds of one collective on one group."""

    machine: str
    kind: CollectiveKind
    topology: GroupTopology
    cluster: Cluster
    nbytes: Floats
    seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Numbers of one link to fit, on the sweeps that `takes` accepts."""

    numbers: tuple[str, ...]
    takes: Callable[[Sweep], bool]
    network: bool = False
    """The link between nodes instead of the one inside."""


def _inside(machines: str, kind: str = "all_reduce") -> Callable[[Sweep], bool]:
    names = machines.split()
    return lambda sweep: sweep.machine in names and sweep.topology.nodes == 1 and sweep.kind == kind


RING = ("bytes_per_second", "startup_seconds", "ramp_seconds", "pass_seconds_per_byte")
TARGETS: Mapping[str, Target] = {
    "NVSwitch3": Target(numbers=RING, takes=_inside("a100 a100_dgx")),
    "NVSwitch3 of vTrain (t1)": Target(numbers=RING, takes=_inside("a100")),
    "NVSwitch3 of Vidur (t1)": Target(numbers=RING, takes=_inside("a100_dgx")),
    "NVLink2 of vTrain": Target(numbers=("startup_seconds", "ll128_efficiency"), takes=_inside("v100")),
    "NVSwitch4": Target(numbers=("startup_seconds", "ramp_seconds", "multicast_fraction"), takes=_inside("8xH200")),
    "NVSwitch5": Target(numbers=("startup_seconds", "ramp_seconds", "multicast_fraction"), takes=_inside("8xB200")),
    "EFA": Target(
        numbers=("bytes_per_second", "latency_seconds", "ramp_bytes"),
        takes=lambda sweep: sweep.machine.startswith("2x p4de"),
        network=True,
    ),
}
_FILES = ("coll_vtrain_allreduce_intranode", "coll_vidur_network", "coll_aws_nccltests_2node", "coll_mleng_4node")


def read_sweeps(data: Path, tier: Tier = "t0") -> list[Sweep]:
    """The published sweeps of the calibration rows, and those of H200 and B200 nodes."""
    points: dict[tuple[Question, str], list[tuple[float, float]]] = {}
    for name in _FILES:
        table = read_table(data / "dev" / f"{name}.csv")
        column, unit = next(iter(table.schema.measured["collective"].items()))
        for row in table.rows:
            question = question_of(row, table.schema)
            if row.get(column) and question.nbytes:
                one = dataclasses.replace(question, nbytes=0.0)
                seconds = float(row[column]) * {"us": 1e-6, "ms": 1e-3}[unit]
                points.setdefault((one, question.hardware), []).append((question.nbytes, seconds))
    sweeps = [_sweep(question, rows, tier) for (question, _), rows in points.items() if _known(question, tier)]
    return [*sweeps, *_nodes_of_eight(data)]


def _known(question: Question, tier: Tier) -> bool:
    return question.nodes == 1 or "EFA" in question.hardware


def _sweep(question: Question, rows: Sequence[tuple[float, float]], tier: Tier) -> Sweep:
    nbytes, seconds = np.array(sorted(rows)).T
    cluster, _ = cluster_of(question, tier)
    return Sweep(
        machine=question.hardware, kind=question.kind, topology=question.topology, cluster=cluster, nbytes=nbytes,
        seconds=seconds,
    )  # fmt: skip


def _nodes_of_eight(data: Path) -> Iterable[Sweep]:
    """All-reduces of 8 H200 and 8 B200 (stas00/ml-engineering network/README.md), kept as bus bandwidths."""
    text = (data / "published" / "nccl_allreduce_measured_h200_b200_a100.csv").read_text()
    rows: dict[str, list[tuple[float, float]]] = {}
    for line in text.replace('"', "").splitlines():
        machine = line[:6]
        if machine in ("8xH200", "8xB200") and "1 node" in line:
            size, busbw = line.split(")", 1)[1].lstrip(",").split(",")[:2]
            unit = {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30}[size[-3]]
            nbytes = float(size[:-3]) * unit
            rows.setdefault(machine, []).append((nbytes, bus_factor("all_reduce", 8) * nbytes / (float(busbw) * 1e9)))
    for machine, points in rows.items():
        yield _sweep(Question(hardware=machine, kind="all_reduce", nbytes=0.0, ranks=8, nodes=1), points, "t0")


def with_values(cluster: Cluster, values: Values, network: bool) -> Cluster:
    """The cluster with these numbers in one of its links."""
    name = "inter_link" if network else "intra_link"
    link = getattr(cluster, name)
    traits = dataclasses.replace(link.traits, **{k: v for k, v in values.items() if k in TRAITS})
    own = {key: value for key, value in values.items() if key not in TRAITS}
    return dataclasses.replace(cluster, **{name: dataclasses.replace(link, traits=traits, **own)})


def log_errors(sweeps: Iterable[Sweep], values: Values, network: bool) -> list[tuple[Floats, Floats]]:
    """Per sweep: its sizes and log(predicted / measured)."""
    found = []
    for sweep in sweeps:
        cluster = with_values(sweep.cluster, values, network)
        predicted = collective_seconds(sweep.kind, sweep.nbytes, sweep.topology, cluster)
        found.append((sweep.nbytes, np.log(predicted / sweep.seconds)))
    return found


def loss(sweeps: Sequence[Sweep], values: Values, network: bool) -> float:
    """Mean over the bins of sizes of the mean |log error|, each sweep weighing the same."""
    errors = log_errors(sweeps, values, network)
    means = []
    for low, high in BINS:
        parts = [np.abs(error[(sizes >= low) & (sizes < high)]) for sizes, error in errors]
        parts = [part for part in parts if part.size]
        if parts:
            means.append(float(np.mean([np.mean(part) for part in parts])))
    return float(np.mean(means))


def fit(target: Target, sweeps: Sequence[Sweep]) -> dict[str, float]:
    """The numbers of least loss: one after the other is multiplied up and down, by steps that shrink."""
    cluster = sweeps[0].cluster
    link = cluster.inter_link if target.network else cluster.intra_link
    values = {name: STARTS.get(name, link.bytes_per_second) for name in target.numbers}
    best, step = loss(sweeps, values, target.network), 0.4
    while step > 0.005:
        improved = False
        for name in target.numbers:
            for factor in (1 + step, 1 / (1 + step)):
                changed = {**values, name: values[name] * factor}
                found = loss(sweeps, changed, target.network)
                if found < best - 1e-9:
                    values, best, improved = changed, found, True
        step = step if improved else step / 2
    return values


def medians(sweeps: Sequence[Sweep], values: Values, network: bool) -> str:
    """Median |predicted / measured - 1| of the three bins, as text."""
    errors = log_errors(sweeps, values, network)
    parts = []
    for low, high in BINS:
        rows = np.concatenate([error[(sizes >= low) & (sizes < high)] for sizes, error in errors])
        parts.append(f"{100 * float(np.median(np.abs(np.expm1(rows)))):.1f} %" if rows.size else "-")
    return " / ".join(parts)


@click.command(help=__doc__)
@click.option("--data", type=click.Path(path_type=Path), help="Folder of measurements; else $AUTOPAR_GROUNDTRUTH.")
def main(data: Path | None) -> None:
    sweeps = read_sweeps(folder(data))
    for name, target in TARGETS.items():
        own = [sweep for sweep in sweeps if target.takes(sweep)]
        values = fit(target, own)
        click.echo(f"{name}: {', '.join(f'{key} {value:.4g}' for key, value in values.items())}")
        click.echo(f"  fitted, small / mid / large: {medians(own, values, target.network)}")
        for label, key in (("machine", _machine), ("ranks", _ranks)):
            for left_out in sorted({key(sweep) for sweep in own}):
                seen = [sweep for sweep in own if key(sweep) != left_out]
                unseen = [sweep for sweep in own if key(sweep) == left_out]
                if seen:
                    held = medians(unseen, fit(target, seen), target.network)
                    click.echo(f"  without {label} {left_out}, on it: {held}")


def _machine(sweep: Sweep) -> str:
    return sweep.machine


def _ranks(sweep: Sweep) -> str:
    return str(sweep.topology.ranks)


if __name__ == "__main__":
    main()
