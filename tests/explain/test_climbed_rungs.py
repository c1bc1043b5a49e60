"""The memory ladder of a plan: its bytes are those of the step, its seconds those that the played step is longer."""

from __future__ import annotations

import json

import pytest

from autopar.cost_models.simulator import simulate
from autopar.explain.asked_step import asked_step
from autopar.explain.memory_ladder import MemoryLadder
from autopar.explain.memory_over_time import memory_over_time
from autopar.plans.parallel_plan import Plan
from autopar.plans.rung_names import IN_SPANS, KEPT, ON_HOST, STATES_ON_HOST
from autopar.report.html.memory_picture import memory_pictures
from autopar.simulation.played_plan import simulate_step
from tests.planner.one_mesh.test_host_labels import SAVED, SMALL, STATES, planned


def host_plan() -> Plan:
    return planned(SMALL, offload="all")


def spans_plan() -> Plan:
    return planned(STATES + 9 * SAVED, offload="activations")


def ladder_of(plan: Plan) -> MemoryLadder:
    found = plan.memory().ladder
    assert found is not None
    return found


@pytest.mark.parametrize("plan", [host_plan, spans_plan])
def test_memory_and_played_step_are_those_predicted(plan: object) -> None:
    """With parameters on the host, whose states the device does not hold, too."""
    assert callable(plan)
    found: Plan = plan()
    assert found.memory().peak_bytes == found.predicted.peak_bytes
    played = simulate_step(asked_step(found.origin.source, found).step)  # type: ignore[union-attr]
    assert played.step_seconds == pytest.approx(found.predicted.step_seconds, rel=1e-9)
    assert played.peak_bytes == (found.predicted.peak_bytes,)


@pytest.mark.parametrize("plan", [host_plan, spans_plan])
def test_rungs_hold_what_the_plan_says_and_cost_what_the_step_is_longer(plan: object) -> None:
    assert callable(plan)
    found: Plan = plan()
    ladder, free = ladder_of(found), planned(4 * STATES).predicted.step_seconds
    assert {rung.name: rung.bytes for rung in ladder.rungs} == found.predicted.bytes_by_rung
    assert all((rung.seconds > 0.0) == (rung.name != KEPT) for rung in ladder.rungs)
    longer = found.predicted.step_seconds - free
    assert sum(rung.seconds for rung in ladder.rungs) == pytest.approx(longer, rel=0.05)


def test_over_time_a_ladder_shows_what_is_where() -> None:
    ladder = ladder_of(host_plan())
    sizes = {rung.name: rung.bytes for rung in ladder.rungs}
    assert ladder.host_peak_bytes == sizes[ON_HOST] + sizes[STATES_ON_HOST]
    assert ladder.over_time[0][2] == sizes[STATES_ON_HOST]
    assert ladder.over_time[-1][2] == sizes[STATES_ON_HOST]
    assert any(held.get(ON_HOST) for _, held, _ in ladder.over_time)
    again = [held.get(IN_SPANS, 0.0) for moment, held, _ in ladder_of(spans_plan()).over_time]
    assert max(again) >= SAVED
    assert again[0] == 0.0


def test_a_rung_is_free_where_what_it_adds_takes_no_time() -> None:
    plan = spans_plan()
    step = asked_step(plan.origin.source, plan).step  # type: ignore[union-attr]
    whole, free = (simulate(step.actions(free=rung), step.beside).makespan_seconds for rung in (ON_HOST, IN_SPANS))
    assert whole == pytest.approx(plan.predicted.step_seconds)
    assert free < whole


def test_the_table_and_its_document_say_rungs_moments_and_the_next_gib() -> None:
    table = host_plan().memory()
    text = str(table)
    for said in ("kept on the device", "parameters on the host", "in the host's memory", "one GiB more of memory"):
        assert said in text
    document = json.loads(json.dumps(table.document()))
    assert set(document["ladder"]) == {"rungs", "over_time", "host_peak_bytes", "host_limit_bytes"}
    assert {"name", "bytes", "peak_bytes", "seconds"} == set(document["ladder"]["rungs"][0])
    assert set(document["next_gib"]) == {"dual_seconds", "at_most_seconds", "found_seconds"}
    assert planned(4 * STATES).memory().ladder is None


def test_the_report_draws_rungs_and_what_is_on_the_host() -> None:
    plan = host_plan()
    step = asked_step(plan.origin.source, plan).step  # type: ignore[union-attr]
    here, there = memory_pictures(memory_over_time(step, simulate_step(step).timeline))
    assert (here.name, there.name) == ("rank 0", "rank 0, on the host")
    assert there.peak_bytes == ladder_of(plan).host_peak_bytes
    assert {layer.kind for layer in there.layers} == {ON_HOST, STATES_ON_HOST}
    assert here.peak_bytes == plan.predicted.peak_bytes
    assert "brought from the host" in {layer.kind for layer in here.layers}
