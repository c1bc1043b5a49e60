"""Pipelines on devices of several kinds: every stage inside one part of a `MixedCluster`, priced as that part is.

    "1x8 H100-SXM + 2x8 A100-80", 32 blocks      stage 0: 16 blocks on ranks 0 .. 7 (H100-SXM)
                                                 stages 1, 2: 8 blocks each on a node of A100-80

Groups of a few sizes of every part are planned as those of unequal stages are (`solved_submeshes.py`), with the part's
own prices and memory; the stage search then chooses blocks, part, size and recomputation of all stages at once
(`stage_search.py` knows the parts as groups of devices), and knows which borders cross the link between parts. All
devices are used. Which part runs the front of the model is open, so that it may stand in the middle.

Restricted: a stage never spans kinds, so without micro-batches there is no plan; one stage per rank group.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.errors import ConfigurationError, InfeasibleError
from autopar.hardware.cluster import Cluster, MixedCluster
from autopar.hardware.rank_groups import cluster_of
from autopar.planner.batch.batch_flow import NotSeparable
from autopar.planner.one_mesh.query import Query
from autopar.planner.pipelines.pipeline_bound import least_over_all_groups
from autopar.planner.pipelines.plan_pipeline import micro_batch_counts, needed_recapture
from autopar.planner.pipelines.solved_submeshes import SubMesh, SubMeshes
from autopar.planner.pipelines.unequal_groups import Unequal, best_unequal
from autopar.planner.pipelines.write_groups import unequal_plan
from autopar.planner.pipelines.write_pipeline import check_cut
from autopar.planner.problem.limits import LIMITS
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes, format_seconds
from autopar.program import batch_size
from autopar.request.memory_limit import budget
from autopar.request.pipeline_request import UNEQUAL_FAMILIES, PipelineRequest

log = logging.getLogger(__name__)


def plan_mixed(query: Query, asked: PipelineRequest, memory_limit: float | str | None) -> Plan:
    """The best pipeline over all parts. query: of the whole batch, on a `MixedCluster`; memory_limit: as a request has
    it; no device gives more than it has.

    Raises ConfigurationError where the batch cannot be cut, and InfeasibleError where nothing fits.
    """
    cluster = query.cluster
    assert isinstance(cluster, MixedCluster)
    whole = SubMeshes(query, needed_recapture(query))
    shapes = [
        whole.in_part(
            replace(query, cluster=part, budget_bytes=min(budget(memory_limit, part), budget(None, part))),
            number,
            cluster.inter_link,
        )
        for number, part in enumerate(cluster.parts)
    ]
    parts = [(part.num_devices, part.devices_per_node) for part in cluster.parts]
    families = UNEQUAL_FAMILIES if asked.family is None else (asked.family,)
    stages = None if asked.num_groups == -1 or asked.sizes else asked.num_groups
    best: Unequal | None = None
    least, worse = math.inf, 0
    compared: list[str] = []
    for count, subs in _by_count(query, cluster, shapes, asked):
        tables = [sub.table for sub in subs]
        if len({table.group for table in tables}) == len(cluster.parts):
            least = min(least, least_over_all_groups(tables, [p.num_devices for p in cluster.parts], count))
        found = best_unequal(subs, parts, count, asked.sizes, families, stages)
        if found is None:
            compared.append(f"{count} micro-batches do not fit")
            continue
        compared.append(f"{count} micro-batches {found.pipeline.family} {format_seconds(found.pipeline.step_seconds)}")
        log.info(compared[-1])
        if best is None or found.pipeline.step_seconds < best.pipeline.step_seconds:
            best, worse = found, 0
        else:
            worse += 1
        if worse == LIMITS.slower_counts:
            break
    if best is None:
        raise _nothing_fits(cluster, shapes, asked, compared)
    check_cut(best.subs[0].query, best.subs[0].runs, best.pipeline)
    plan = unequal_plan(best, least, cluster.name)
    notes = (*plan.notes, f"compared: {'; '.join(compared)}; with groups of {_sizes_in_words(shapes, asked)} devices")
    return replace(plan, profile=cluster.profile, notes=notes)


def _by_count(
    query: Query, cluster: MixedCluster, shapes: Sequence[SubMeshes], asked: PipelineRequest
) -> Iterator[tuple[int, list[SubMesh]]]:
    """(micro-batches, sub-meshes of all parts), as long as the search has time; at least one."""
    batch = batch_size(query.program) or 1
    open_groups = max(len(cluster.parts), min(LIMITS.groups_of_parts, cluster.num_nodes))
    groups = asked.num_groups if asked.num_groups > 0 else open_groups
    counts = micro_batch_counts(batch, groups) if query.micro_batches is None else [query.micro_batches]
    reason: object = f"a batch of {batch} has no micro-batches to keep the stages busy: pass a larger one"
    began, yielded = time.process_time(), False
    for count in counts:
        try:
            subs = [sub for part in shapes for size in group_sizes(part.cluster, asked) for sub in part.of(count, size)]
        except NotSeparable as error:
            reason = f"the batch cannot be cut: {error}"
            continue
        yielded = True
        yield count, subs
        if time.process_time() - began > query.search.meshes_seconds or query.deadline.left() <= 0.0:
            break
    if not yielded:
        raise ConfigurationError(
            f"{cluster.name!r} has devices of several kinds, on which a model runs as a pipeline, and its stages take "
            f"the batch in parts: {reason}; or plan for one part, {cluster.parts[0].name!r}"
        )


def group_sizes(part: Cluster, asked: PipelineRequest) -> list[int]:
    """Devices of the rank groups that are tried on one part: a node, all nodes, half a node."""
    node, nodes = part.devices_per_node, part.num_nodes
    halves = [size for size in range(node // 2, 0, -1) if node % size == 0]
    more = [count * node for count in range(2, nodes) if nodes % count == 0]
    tried = asked.sizes or tuple(dict.fromkeys([node, node * nodes, *halves[:1], *more]))[: LIMITS.sizes_per_part]
    return [size for size in dict.fromkeys(tried) if _lies_in(part, size)]


def _lies_in(part: Cluster, size: int) -> bool:
    try:
        cluster_of(part, size)
    except ConfigurationError:
        return False
    return True


def _sizes_in_words(shapes: Sequence[SubMeshes], asked: PipelineRequest) -> str:
    parts = [part.cluster for part in shapes]
    return "; ".join(f"{', '.join(map(str, group_sizes(part, asked)))} {part.device.name}" for part in parts)


def _nothing_fits(
    cluster: MixedCluster, shapes: Sequence[SubMeshes], asked: PipelineRequest, compared: Sequence[str]
) -> InfeasibleError:
    limits = ", ".join(f"{format_bytes(part.budget_bytes)} of {part.cluster.device.name}" for part in shapes)
    return InfeasibleError(
        f"no pipeline over {cluster.name!r} fits {limits} ({'; '.join(compared)}; with groups of "
        f"{_sizes_in_words(shapes, asked)} devices): more micro-batches, more devices, other sizes in "
        'dims={"pp": [...]} or a higher memory_limit may fit'
    )
