"""Families beyond 1F1B: published closed forms, memory, both directions, steps that do not drain; faults are caught."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from autopar.errors import ConfigurationError
from autopar.schedules.actions import PipeAction, Schedule, parse_schedule
from autopar.schedules.check import check_schedule, runnable_order
from autopar.schedules.list_scheduler import FAMILIES, StageTimes, build_schedule, list_schedule
from autopar.schedules.orders import unfolded
from tests.schedules.test_list_scheduler import built, makespan


def times(stages: int, forward: float, backward: float, weight: float) -> StageTimes:
    return StageTimes(
        forward=(forward,) * stages,
        backward=(backward,) * stages,
        weight=(weight,) * stages,
        send=(0.0,) * (stages - 1),
    )


def bubble(schedule: Schedule, forward: float, backward: float, weight: float) -> float:
    """Time beyond a rank's work, in the units of a chunk's pass."""
    stages, ranks = schedule.num_stages, len(schedule.ranks)
    copies = sum(map(len, schedule.holders)) // stages
    work = schedule.micro_batches * (stages // ranks) * (forward + backward + weight)
    assert copies in (1, 2)
    return makespan(schedule, times(stages, forward, backward, weight)) - work


def kept(schedule: Schedule) -> list[int]:
    """Most chunks per rank between F and B or W."""
    return [
        max(itertools.accumulate({"F": 1, "I": 0}.get(action.kind, -1) for action in actions))
        for actions in schedule.ranks
    ]


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("depth", [4, 8, 16])
def test_chimera_has_its_published_bubble(depth: int, rounds: int) -> None:
    """(D - 2) / (2 N + D - 2) with B = F, any N = k D; (D - 2) / (3/2 N + D - 2) with B = 2 F and N = D (SC 2021)."""
    count = rounds * depth
    schedule = build_schedule("chimera", depth, count)
    idle = Fraction(bubble(schedule, 1.0, 1.0, 0.0))
    assert idle / (idle + 2 * count) == Fraction(depth - 2, 2 * count + depth - 2)
    if rounds == 1:
        idle = Fraction(bubble(schedule, 1.0, 2.0, 0.0))
        assert idle / (idle + 3 * count) == Fraction(2 * (depth - 2), 3 * count + 2 * (depth - 2))
    assert max(kept(schedule)) <= depth
    assert min(kept(schedule)) >= depth // 2 + 1


@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_waves_divide_the_bubble(ranks: int, waves: int) -> None:
    """(2P - 2) / (3PW + 2P - 2) with P micro-batches and B = 2F; for one wave (2P - 2) / (5P - 2)."""
    schedule = build_schedule("hanayo", ranks, ranks, 2 * waves)
    idle = Fraction(bubble(schedule, 1.0, 2.0, 0.0))
    rate = idle / (idle + 6 * waves * ranks)
    assert rate == Fraction(2 * ranks - 2, 3 * ranks * waves + 2 * ranks - 2)
    simulated = {(4, 2): 0.2131, (8, 2): 0.2381, (4, 4): 0.1193, (8, 4): 0.1351}
    assert rate <= simulated.get((ranks, waves), 1.0)
    assert max(kept(schedule)) <= 2 * waves * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 12, 16])
def test_controllable_memory_trades_it_for_bubble(ranks: int) -> None:
    """Of 1F1B's bubble 6 (p - 1) and memory 2 p chunks: half and half, and two thirds and a third, plus a constant."""
    one = 6 * (ranks - 1)
    half, least = (build_schedule(family, ranks, 4 * ranks, 2) for family in ("v-half", "v-min"))
    assert bubble(half, 1.0, 1.0, 1.0) <= one / 2
    assert max(kept(half)) <= ranks + 2
    assert bubble(least, 1.0, 1.0, 1.0) <= 2 * one / 3 + 1
    assert max(kept(least)) <= -(-2 * ranks // 3) + 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("forward", "backward", "weight"), [(1.0, 1.0, 1.0), (1.2, 1.1, 0.9), (1.0, 1.5, 0.5)])
def test_the_dual_pipe_has_its_published_bubble(
    ranks: int, rounds: int, forward: float, backward: float, weight: float
) -> None:
    """(PP / 2 - 1)(F&B + B - 3W), PP = 2p stages, and PP + 1 chunks; F&B takes F + B here, B with W (its README)."""
    schedule = build_schedule("dualpipe-v", ranks, 2 * rounds * ranks, 2)
    whole = backward + weight
    expected = (ranks - 1) * (forward + whole + whole - 3 * weight)
    assert bubble(schedule, forward, backward, weight) <= expected + 1e-9
    assert max(kept(schedule)) <= 2 * ranks + 1


def test_the_dual_pipe_runs_what_torch_runs() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for ranks, micro_batches in ((2, 4), (4, 8), (4, 13)):
        ours = build_schedule("dualpipe-v", ranks, micro_batches, 2)
        torchs = schedules.ScheduleDualPipeV.__new__(schedules.ScheduleDualPipeV)
        torchs.pp_group_size, torchs._n_microbatches = ranks, micro_batches
        for rank, actions in enumerate(ours.ranks):
            flat: list[object] = []
            for action in torchs._calculate_single_rank_operations(rank):
                flat += action.sub_actions if action.sub_actions is not None else [action]
            assert [str(a) for a in actions if a.kind != "W"] == [str(a) for a in flat if "W" not in str(a)]


@pytest.mark.parametrize(("family", "folded"), [("chimera", ("hanayo", 2)), ("dualpipe", ("dualpipe-v", 2))])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_both_directions_take_as_long_as_the_fold(family: str, folded: tuple[str, int], ranks: int) -> None:
    both = build_schedule(family, ranks, 2 * ranks)
    name, chunks = folded
    one = build_schedule(name, ranks // 2, ranks, chunks)
    assert both == unfolded(one, 2 * ranks)
    assert both.holders == tuple(tuple(sorted((stage, ranks - 1 - stage))) for stage in range(ranks))
    plain = StageTimes.equal(ranks)
    assert makespan(both, plain) == makespan(one, plain)
    down = {both.rank_of(0, index) for index in range(0, 2 * ranks, 2)}
    up = {both.rank_of(0, index) for index in range(1, 2 * ranks, 2)}
    assert (down, up) == ({0}, {ranks - 1})
    with pytest.raises(ConfigurationError, match="stage 0 stands on ranks 0 and"):
        _ = both.rank_of_stage


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 2), (4, 4), (4, 11), (6, 8)])
def test_a_pipeline_that_does_not_drain_only_fills(ranks: int, micro_batches: int) -> None:
    """A step in the middle: m (F + B) behind p - 1 forwards, as every call begins on the first rank."""
    schedule = build_schedule("2bw", ranks, micro_batches)
    check_schedule(schedule, [ranks - rank for rank in range(ranks)])
    ends: dict[tuple[int, str, int], float] = {}
    clock = [0.0] * ranks
    for rank, action in runnable_order(schedule):
        needed = schedule.awaited(action)
        ready = 0.0 if needed is None else ends[(*needed, action.micro_batch)]
        clock[rank] = max(clock[rank], ready) + (1.0 if action.kind == "F" else 2.0)
        ends[action.stage, "F" if action.kind == "F" else "gradient", action.micro_batch] = clock[rank]
    assert max(clock) == 3.0 * micro_batches + ranks - 1


def test_two_steps_on_end_run_every_backward_behind_its_forward() -> None:
    """The left-over backwards of a step are those that the step before did not run."""
    schedule = build_schedule("2bw", 4, 5)
    for actions in schedule.ranks:
        done: list[PipeAction] = []
        for step in range(3):
            done += [action._replace(micro_batch=action.micro_batch + 5 * step) for action in actions]
        backward = [a.micro_batch for a in done if a.kind == "B" and a.micro_batch >= 0]
        assert backward == list(range(len(backward)))
        for index in backward:
            stage = actions[0].stage
            assert done.index(PipeAction(stage, "F", index)) < done.index(PipeAction(stage, "B", index))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_one_fault_in_each_family_is_caught(family: str) -> None:
    """The last action of a rank is lost; or the last forward of the last stage comes behind its backward."""
    schedule = built(family, 4, 8, 1)
    check_schedule(schedule)
    lost = Schedule((schedule.ranks[0][:-1], *schedule.ranks[1:]))
    with pytest.raises(ConfigurationError, match="must be F B"):
        check_schedule(lost)
    last = schedule.num_stages - 1
    rank = schedule.holders[last][0]
    first = list(schedule.ranks[rank])
    late = max(index for index, action in enumerate(first) if action.kind == "F" and action.stage == last)
    behind = next(i for i, a in enumerate(first) if a.kind in "BI" and a[::2] == first[late][::2])
    first.insert(behind, first.pop(late))
    with pytest.raises(ConfigurationError, match=r"must be F B|deadlock"):
        check_schedule(Schedule((*schedule.ranks[:rank], tuple(first), *schedule.ranks[rank + 1 :])))


def test_left_over_passes_must_be_backwards_of_the_last_step() -> None:
    text = str(build_schedule("2bw", 2, 3))
    assert parse_schedule(text) == build_schedule("2bw", 2, 3)
    for wrong, right in (("0F-1", "0B-1"), ("0B-4", "0B-1"), ("0B2", "0B-1")):
        with pytest.raises(ConfigurationError, match=r"must be F B|step before has"):
            check_schedule(parse_schedule(text.replace(right, wrong)))


@pytest.mark.parametrize(("family", "limit"), [("v-half", 5.0), ("v-min", 4.0), ("dualpipe-v", 8.0), ("zb-v", 7.0)])
def test_less_memory_than_the_family_asks_for_is_kept(family: str, limit: float) -> None:
    schedule = list_schedule(FAMILIES[family], 4, 12, 2, StageTimes.equal(8), memory_limit=limit)
    check_schedule(schedule)
    assert max(kept(schedule)) <= limit
    with pytest.raises(ConfigurationError, match="too few"):
        list_schedule(FAMILIES[family], 4, 12, 2, StageTimes.equal(8), memory_limit=1.0)
