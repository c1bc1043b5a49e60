"""Pipelines beside the free search: a few of them, within a share of its time.

    2 nodes of 8     2 groups of 8, 4 of 4, 8 of 2; two micro-batches per group, then one, then four; two meshes each;
                     then stages on groups of different sizes

The most promising number of groups comes first: one per node, up to eight. What was solved for a size serves every
pipeline of that size. A pipeline whose bound (`bound.py`) is above the best step so far is not played. `QUICK` are the
schedules that are compared, for less than the time of one solve.

Restricted, and said in a note: few meshes, solved without a memory limit; few numbers of micro-batches; layouts at the
borders of stages are those of the sub-mesh's plan. `mode="max"` compares more, `dims={"pp": ...}` pins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import ConfigurationError
from autopar.parallel_plan import Plan
from autopar.plan_text import format_seconds
from autopar.planner.batch_flow import NotSeparable
from autopar.planner.micro_batches import AtBatch, batch_size
from autopar.planner.query import Progress, Query
from autopar.planner.stages.bound import least_over_all_groups, least_step_seconds
from autopar.planner.stages.choose import Pipeline, try_tables
from autopar.planner.stages.shapes import SubMesh, SubMeshes, cluster_of
from autopar.planner.stages.unequal import Unequal, best_unequal
from autopar.planner.stages.write_groups import unequal_plan
from autopar.planner.stages.write_plan import check_cut, pipeline_plan

QUICK = ("1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved")
MOST_GROUPS = 64
GROUPS = 8
"""The number of rank groups that is tried first, where there are as many nodes."""
PER_GROUP = (2, 1, 4)
"""Micro-batches per rank group, in the order in which they are tried."""
SHOWN = 6
"""Pipelines that the note lists."""


@dataclass(slots=True, kw_only=True)
class Compared:
    """What the search found. least_seconds: no pipeline that was compared takes less, whatever its cut, its schedule,
    its recomputation and the memory; infinity where none was."""

    best: tuple[Pipeline, SubMesh] | Unequal | None = None
    least_seconds: float = math.inf
    tried: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        if self.best is None:
            return math.inf
        found = self.best.pipeline if isinstance(self.best, Unequal) else self.best[0]
        return found.step_seconds


def compare_pipelines(
    query: Query, counts: int | None, at_batch: AtBatch, below: float, cpu_seconds: float, log: Progress
) -> Compared:
    """The best of a few pipelines whose step is below so many seconds. counts: the micro-batches that are asked for.

    cpu_seconds: after which no other sub-mesh is solved."""
    began, compared, shapes = time.process_time(), Compared(), SubMeshes(query, at_batch)
    for groups, count in candidates(query, counts):
        name = f"pp={groups} with {count} micro-batches"
        if time.process_time() - began > cpu_seconds or query.deadline.left() <= 0.0:
            compared.left_out.append(name)
            continue
        try:
            for sub in shapes.of(count, query.cluster.num_devices // groups):
                _compare(compared, sub, groups, count, min(below, compared.step_seconds))
                log(f"{name}, {sub.solved.mesh.shape}: {compared.tried[-1]}")
                if time.process_time() - began > cpu_seconds:
                    break
        except (NotSeparable, ConfigurationError) as reason:
            compared.left_out.append(f"{name} ({reason})")
    for count in sorted({count for _, count in candidates(query, counts)}):
        _compare_unequal(compared, shapes.known(count), query, count, below)
    return compared


def _compare_unequal(compared: Compared, subs: Sequence[SubMesh], query: Query, count: int, below: float) -> None:
    """Stages on groups of different sizes, over everything that was solved for a number of micro-batches."""
    cluster = query.cluster
    if len({sub.table.devices for sub in subs}) < 2:
        return
    least = least_over_all_groups([sub.table for sub in subs], [cluster.num_devices], count)
    compared.least_seconds = min(compared.least_seconds, least)
    if least >= min(below, compared.step_seconds):
        return
    found = best_unequal(subs, [(cluster.num_devices, cluster.devices_per_node)], count)
    if found is None or len(found.subs) < 2 or found.pipeline.step_seconds >= min(below, compared.step_seconds):
        return
    sizes = ", ".join(str(sub.table.devices) for sub in found.subs)
    step = format_seconds(found.pipeline.step_seconds)
    compared.tried.insert(0, f"groups of {sizes}, {count} micro-batches: {found.pipeline.family} {step}")
    compared.best = found


def _compare(compared: Compared, sub: SubMesh, groups: int, count: int, below: float) -> None:
    """One sub-mesh: its bound, and the best of its schedules where that may be below."""
    least = min(least_step_seconds(table, groups, count) for table in sub.tables)
    compared.least_seconds = min(compared.least_seconds, least)
    where = f"pp={groups} x {'x'.join(map(str, sub.solved.mesh.shape))}, {count} micro-batches"
    if least >= below:
        compared.tried.append(f"{where}: at least {format_seconds(least)}")
        return
    families = [name for name in QUICK if name not in ("zb-v", "interleaved") or 2 * groups <= sub.table.num_blocks]
    found = try_tables(sub.tables, groups, count, families)[0].pipeline
    if found is None:
        compared.tried.append(f"{where}: does not fit")
        return
    compared.tried.append(f"{where}: {found.family} {format_seconds(found.step_seconds)}")
    if found.step_seconds < below:
        compared.best = found, sub


def candidates(query: Query, count: int | None = None) -> Iterator[tuple[int, int]]:
    """(rank groups, micro-batches), the most promising first."""
    size, cluster = batch_size(query.program) or 1, query.cluster
    wanted = min(GROUPS, max(2, cluster.num_nodes))
    possible = [groups for groups in range(2, min(cluster.num_devices, MOST_GROUPS) + 1) if _divides(query, groups)]
    possible.sort(key=lambda groups: (abs(math.log(groups / wanted)), groups))
    divisors = [number for number in range(2, size + 1) if size % number == 0]
    later = []
    for groups in possible:
        counts = [count] if count is not None else _counts(divisors, groups)
        if counts:
            yield groups, counts[0]
        later += [(groups, number) for number in counts[1:]]
    yield from later


def _counts(divisors: Sequence[int], groups: int) -> list[int]:
    """The divisors of the batch nearest to some micro-batches per group."""
    wanted = [factor * groups for factor in PER_GROUP] if divisors else []
    return list(dict.fromkeys(min(divisors, key=lambda number: abs(math.log(number / want))) for want in wanted))


def _divides(query: Query, groups: int) -> bool:
    devices, rest = divmod(query.cluster.num_devices, groups)
    if rest:
        return False
    try:
        cluster_of(query.cluster, devices)
    except ConfigurationError:
        return False
    return True


def write_compared(query: Query, compared: Compared) -> Plan | None:
    """The plan of the best pipeline. Raises ConfigurationError where the runtime cannot cut the model so, and
    InfeasibleError where stages cannot recompute each in its own way."""
    if compared.best is None:
        return None
    if isinstance(compared.best, Unequal):
        first = compared.best.subs[0]
        check_cut(first.query, first.runs, compared.best.pipeline)
        return unequal_plan(compared.best, compared.least_seconds, query.cluster.name)
    pipeline, sub = compared.best
    check_cut(sub.query, sub.runs, pipeline)
    plan = pipeline_plan(sub.query, sub.solution, sub.solved, sub.runs, pipeline, compared.least_seconds)
    return replace(plan, cluster=query.cluster.name)


def what_was_compared(compared: Compared) -> list[str]:
    """Notes: the pipelines and their steps or bounds, and what was left out."""
    notes = []
    if compared.tried:
        more = len(compared.tried) - SHOWN
        shown = "; ".join(compared.tried[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
        notes.append(
            f"pipelines compared ({', '.join(QUICK)}; layouts of the plan of a sub-mesh): {shown}. None of them takes "
            f"less than {format_seconds(compared.least_seconds)}, with any cut and schedule"
        )
    if compared.left_out:
        notes.append(f"pipelines not compared: {', '.join(compared.left_out[:SHOWN])}")
    return notes
