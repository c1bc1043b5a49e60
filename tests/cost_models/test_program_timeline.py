"""A pass on streams: collectives run beside kernels up to their wait, and bytes follow the kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_models.program_costs import COMPUTE, ProgramAction
from autopar.cost_models.program_timeline import PassBytes, issued, pass_program, wait_positions
from autopar.cost_models.simulator import Timeline, simulate
from tests.graphs.test_copy_nodes import offloaded


def action(position: int, seconds: float, stream: str = COMPUTE) -> ProgramAction:
    return ProgramAction(
        name=f"n{position}", phase="backward", stream=stream, seconds=seconds, kind="k", position=position
    )


PASS = [action(0, 1.0), action(1, 3.0, "dp"), action(2, 2.0), action(4, 1.0)]


def played(waits: dict[int, int]) -> Timeline:
    return simulate(issued(PASS, waits))


def test_a_collective_that_is_awaited_at_once_hides_nothing() -> None:
    assert played({}).makespan_seconds == 7.0
    assert played({}).exposed_communication_seconds == 3.0


def test_kernels_in_front_of_the_wait_hide_it() -> None:
    timeline = played({1: 3})
    assert timeline.makespan_seconds == 5.0
    assert timeline.exposed_communication_seconds == 1.0


def test_what_nothing_reads_is_awaited_at_the_end() -> None:
    timeline = played({1: 5})
    assert timeline.actions[-1].name == "waits"
    assert timeline.makespan_seconds == 4.0
    assert timeline.exposed_communication_seconds == 0.0


def test_collectives_of_one_group_follow_each_other_and_those_of_others_do_not() -> None:
    same = issued([action(0, 3.0, "dp"), action(1, 3.0, "dp")], {0: 2, 1: 3})
    other = issued([action(0, 3.0, "dp"), action(1, 3.0, "tp")], {0: 2, 1: 3})
    assert simulate(same).makespan_seconds == 6.0
    assert simulate(other).makespan_seconds == 3.0


def test_the_processor_s_share_of_a_collective_is_never_hidden() -> None:
    mine = [PASS[0], replace(PASS[1], host_seconds=0.5), *PASS[2:]]
    steps = [simulate(issued(mine, waits)).makespan_seconds for waits in ({}, {1: 3}, {1: 5})]
    assert steps == [7.0, 5.0, 4.5]  # alone, and where it waits anyway, it is a part of the 3 s


@pytest.mark.parametrize("host_seconds", [0.0, 0.5])
@pytest.mark.parametrize("waits", [{}, {1: 3}, {1: 5}])
def test_the_peak_is_that_of_the_live_ranges_however_collectives_run(
    waits: dict[int, int], host_seconds: float
) -> None:
    held = PassBytes(live=(8.0, 12.0, 20.0, 20.0, 10.0), before=4.0, after=6.0)
    mine = [PASS[0], replace(PASS[1], host_seconds=host_seconds), *PASS[2:]]
    timeline = simulate(pass_program(mine, held, waits).actions)
    assert timeline.peak_bytes() == 16.0  # beyond the 4 bytes that were there before
    assert timeline.memory_over_time()[-1][1] == 2.0


def test_actions_in_another_order_are_issued_by_the_positions_given() -> None:
    moved = [replace(one, position=2 * one.position + 1) for one in PASS]
    assert issued(PASS, {3: 7}, [one.position for one in moved]) == issued(moved, {3: 7}) != issued(PASS, {3: 7})


def test_a_copy_is_awaited_where_its_own_wait_stands() -> None:
    forward, backward = offloaded().graphs
    assert wait_positions(forward.graph.nodes) == {2: 4}  # x y leaving loss parked: the wait reads y, too
    assert wait_positions(backward.graph.nodes) == {1: 2}
