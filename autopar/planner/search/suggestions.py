"""Suggestions: when nothing fits, the shortest list of changes that would fit, each found by planning again.

Single changes first; pairs only where no single one fits. Within one kind (more devices) the smallest that fits counts.

    It fits with 8-bit optimizer state (AdamW8bit) (61.2 GiB, predicted step 1.32 s), or with 16 devices (48.9 GiB, ...)

`why_nothing_fits` skips what cannot fit before anything is solved: parameters, gradients and optimizer state, divided
by all devices, are there at the end of every backward pass; where they may wait on the host, the largest parameter is
read, and any matrix product reads and writes (`least_product_bytes`). What may wait on the host is a change like
others, named only where it was planned, with what moves there; it is no part of pairs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.errors import ConfigurationError, InfeasibleError
from autopar.layouts.placement import Mesh
from autopar.planner.batch.batch_flow import NotSeparable
from autopar.planner.batch.micro_batch_program import Recapture
from autopar.planner.memory.shortage import DoesNotFit, Suggestion, with_more_devices, with_suggestions
from autopar.planner.meshes.choose_micro_batches import in_parts_of, micro_batch_queries
from autopar.planner.meshes.least_memory import least_product_bytes, why_nothing_fits
from autopar.planner.one_mesh.mesh_plan import plan_on_mesh
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.planner.problem.limits import LIMITS
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.planner.problem.search_limits import SEARCH
from autopar.planner.solver.deadline import Deadline
from autopar.plans.plan_value import Prediction
from autopar.program import MicroProgram
from autopar.request.offload import OFFLOADS, Offload, may_wait, why_not

log = logging.getLogger(__name__)

EIGHT_BIT = "AdamW8bit"
STATELESS = "SGD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A question that differs in one thing: what the user would write, and how query and mesh change."""

    description: str
    apply: Callable[[Query, Mesh], tuple[Query, Mesh]]


Kind = Sequence[Change]
"""Changes of which one is enough, the smallest first."""


def suggested(query: Query, failure: DoesNotFit) -> InfeasibleError:
    """The failure with the changes that would fit."""
    if query.constraints.pinned or not query.search.tries_suggestions or query.deadline.left() <= 0.0:
        return failure  # pinned parameters keep their layouts on this very mesh; there is nothing to change
    parts_are_fixed = query.micro_batches is not None and query.recapture is not None
    kinds, offloads = _kinds(query, failure.mesh, query.recapture if parts_are_fixed else None), _offloads(query)
    log.info(f"nothing fits; trying {sum(map(len, kinds)) + len(offloads)} changes")
    until = Deadline.after(min(LIMITS.suggestion_seconds, query.deadline.left()), query.deadline.stop)
    quick = replace(query, search=replace(SEARCH["fast"], tries_suggestions=False), deadline=until, warm_start=None)
    tried = _Tried(quick, failure.mesh)
    fits = tried.first_of_each([(kind,) for kind in (offloads, *kinds)])
    if not fits:
        fits = tried.first_of_each(list(itertools.combinations(kinds, 2)))
    searched = _searched(query, tries_parts=query.recapture is not None and not parts_are_fixed)
    return with_suggestions(failure, fits, tried.short, tried.untried, searched)


class _Tried:
    """Changes that were tried, and what came of them."""

    def __init__(self, query: Query, mesh: Mesh) -> None:
        self._query, self._mesh = query, mesh
        self.short: list[str] = []
        self.untried: list[str] = []

    def first_of_each(self, combinations: Sequence[Sequence[Kind]]) -> list[Suggestion]:
        """Of every combination of kinds the first changes that fit together, if any do."""
        found = []
        for kinds in combinations:
            for changes in itertools.product(*kinds):
                suggestion = self._attempt(changes)
                if suggestion is not None:
                    found.append(suggestion)
                    break
        return found

    def _attempt(self, changes: Sequence[Change]) -> Suggestion | None:
        description = " and ".join(change.description for change in changes)
        query, mesh = self._query, self._mesh
        for change in changes:
            query, mesh = change.apply(query, mesh)
        if query.deadline.left() <= 0.0:
            self.untried.append(description)
            return None
        prediction = self._plan(query, mesh)
        if prediction is None:
            self.short.append(description) if len(changes) == 1 else None
            return None
        host = query.cluster.host
        room = 0.0 if host is None else host.bytes_per_device(query.cluster.devices_per_node)
        return Suggestion(description=description, predicted=prediction, host_room=room)

    def _plan(self, query: Query, mesh: Mesh) -> Prediction | None:
        if why_nothing_fits(query, [mesh]) is not None or least_product_bytes(query) > query.budget_bytes:
            return None
        try:
            return plan_on_mesh(query, mesh).plan.predicted
        except (InfeasibleError, ConfigurationError):
            return None


def _kinds(query: Query, mesh: Mesh, recapture: Recapture | None) -> list[Kind]:
    """What can be changed, from what costs nothing to what costs most."""
    kinds: list[Kind] = []
    if query.recompute == "none":
        kinds.append([Change(description='recomputation (without recompute="none")', apply=_recompute)])
    kinds.append(_optimizers(query))
    if recapture is not None:  # after the optimizers: parts add the totals of gradients to their state
        kinds.append(_more_parts(query, recapture))
    kinds.append(
        [
            Change(description=f"{factor * mesh.size} devices", apply=partial(_on_more_devices, factor))
            for factor in LIMITS.more_devices
        ]
    )
    return [kind for kind in kinds if kind]


def _offloads(query: Query) -> Kind:
    """What may wait on the host beside what does, the least first; nothing where there is none for it."""
    if why_not(query.cluster):
        return []
    asked = (offload for offload in OFFLOADS if may_wait(offload) > query.may_wait_on_host)
    return [Change(description=f"offload={offload!r}", apply=partial(_with_offload, offload)) for offload in asked]


def _with_offload(offload: Offload, query: Query, mesh: Mesh) -> tuple[Query, Mesh]:
    return replace(query, offload=offload), mesh


def _more_parts(query: Query, recapture: Recapture) -> Kind:
    """More micro-batches than the user fixed."""
    found = []
    try:
        for parts in itertools.islice(micro_batch_queries(query, recapture), LIMITS.suggested_parts):
            assert parts.micro is not None
            found.append(
                Change(description=f"micro_batches={parts.micro.count}", apply=partial(_in_parts, parts.micro))
            )
    except NotSeparable:
        return []  # the model cannot run in parts
    return found


def _in_parts(micro: MicroProgram, query: Query, mesh: Mesh) -> tuple[Query, Mesh]:
    return in_parts_of(query, micro), mesh


def _optimizers(query: Query) -> Kind:
    """Optimizers with less state than the one that is planned for, the nearest first."""
    names = {
        f"8-bit optimizer state ({EIGHT_BIT}, 2 bytes per parameter element)": EIGHT_BIT,
        "an optimizer without state (torch.optim.SGD)": STATELESS,
    }
    states = {
        description: state_bytes(query.program, name, query.cluster.device.kind) for description, name in names.items()
    }
    return [
        Change(description=description, apply=partial(_with_state, smaller))
        for description, smaller in states.items()
        if any(query.state_bytes[name].optimizer > smaller[name].optimizer for name in smaller)
    ]


def _recompute(query: Query, mesh: Mesh) -> tuple[Query, Mesh]:
    return replace(query, recompute=None), mesh


def _with_state(states: Mapping[str, StateBytes], query: Query, mesh: Mesh) -> tuple[Query, Mesh]:
    return replace(query, state_bytes=states), mesh


def _on_more_devices(factor: int, query: Query, mesh: Mesh) -> tuple[Query, Mesh]:
    larger = Mesh(mesh.axis_names, (factor * mesh.shape[0], *mesh.shape[1:]))
    return replace(query, cluster=with_more_devices(query.cluster, factor)), larger


def _searched(query: Query, tries_parts: bool) -> str:
    """What need not be tried, because the search has tried it."""
    tried = ["recomputation"] if query.recompute != "none" else []
    tried += ["more micro-batches"] if tries_parts else []
    if not tried:
        return ""
    are, were = ("is", "was") if len(tried) == 1 else ("are", "were")
    return f"{' and '.join(tried).capitalize()} {are} part of the search and {were} not enough. "
