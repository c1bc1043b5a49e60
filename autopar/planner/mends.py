"""Mends: when nothing fits, the changes that would fit, each found by planning again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from autopar.errors import InfeasibleError
from autopar.layout import Mesh
from autopar.parallel_plan import Plan
from autopar.planner.one_mesh import plan_on_mesh
from autopar.planner.optimizers import state_bytes
from autopar.planner.query import Progress, Query
from autopar.planner.shortage import MORE_DEVICES, Change, DoesNotFit, with_mends, with_more_devices


def mended(query: Query, failure: DoesNotFit, log: Progress) -> InfeasibleError:
    """The failure with the changes that would fit: an optimizer without state, more devices."""
    if query.constraints.pinned or not query.search.tries_mends:
        return failure  # pinned parameters keep their layouts on this very mesh; there is nothing to change
    stateless = state_bytes(query.program, "SGD")
    log("nothing fits; trying an optimizer without state, and more devices")

    def on_more_devices(factor: int) -> Plan:
        mesh = Mesh(failure.mesh.axis_names, (factor * failure.mesh.shape[0], *failure.mesh.shape[1:]))
        return plan_on_mesh(replace(query, cluster=with_more_devices(query.cluster, factor)), mesh, log).plan

    devices = [
        Change(description=f"{factor * failure.mesh.size} devices", plan=partial(on_more_devices, factor))
        for factor in MORE_DEVICES
    ]
    without_state = Change(
        description="an optimizer without state (torch.optim.SGD)",
        plan=lambda: plan_on_mesh(replace(query, state_bytes=stateless), failure.mesh, log).plan,
    )
    has_state = any(query.state_bytes[name].optimizer > stateless[name].optimizer for name in stateless)
    return with_mends(failure, [[without_state] if has_state else [], devices])
