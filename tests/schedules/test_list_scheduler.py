"""Schedules as data, the list scheduler and the checker: closed forms, brute force, the published rates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ConfigurationError
from autopar.schedules.actions import PipeAction, Schedule, parse_action, parse_schedule, producer, receiver
from autopar.schedules.check import check_schedule, most_in_flight, runnable_order
from autopar.schedules.list_scheduler import FAMILIES, StageTimes, build_schedule, list_schedule

SIZES = st.tuples(st.sampled_from(sorted(FAMILIES)), st.integers(1, 6), st.integers(1, 13), st.integers(1, 3))


def built(family: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Twice the ranks for families that need pairs, and chunks that the family has."""
    policy = FAMILIES[family]
    return build_schedule(
        family,
        2 * ranks if policy.both_ways else ranks,
        micro_batches,
        {"interleaved": chunks, "hanayo": 2 * chunks}.get(family, policy.chunks[0]),
    )


def makespan(schedule: Schedule, times: StageTimes) -> float:
    """A second, slow player: relaxes start times until nothing changes."""
    num_stages = schedule.num_stages
    ends: dict[PipeAction, float] = {}
    seconds = {"F": times.forward, "I": times.backward, "W": times.weight,
               "B": tuple(map(sum, zip(times.backward, times.weight, strict=True)))}  # fmt: skip
    for _ in range(sum(len(actions) for actions in schedule.ranks) + 1):
        before = dict(ends)
        for actions in schedule.ranks:
            clock = 0.0
            for action in actions:
                needed = producer(action, num_stages)
                if needed is not None:
                    kinds = ("F",) if needed[1] == "F" else ("B", "I")
                    inputs = [ends.get(PipeAction(needed[0], kind, action.micro_batch), 0.0) for kind in kinds]
                    clock = max(clock, max(inputs) + times.send[min(action.stage, needed[0])])
                clock += seconds[action.kind][action.stage]
                ends[action] = clock
        if ends == before:
            break
    return max(ends.values())


def test_actions_print_and_parse_as_in_torch() -> None:
    assert str(PipeAction(2, "F", 0)) == "2F0"
    assert parse_action(" 12W34 ") == PipeAction(12, "W", 34)
    for wrong in ("", "F0", "2X0", "2F", "2F0 3", "-1F0"):
        with pytest.raises(ConfigurationError, match="pipeline action"):
            parse_action(wrong)


def test_torch_prints_our_actions_alike() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for text in ("2F0", "1B3", "0I1", "4W2"):
        assert str(schedules._Action.from_str(text)) == str(parse_action(text))


@settings(max_examples=60, deadline=None)
@given(SIZES)
def test_every_family_is_complete_runs_and_reads_back(sizes: tuple[str, int, int, int]) -> None:
    schedule = built(*sizes)
    family, ranks, micro_batches, _ = sizes
    check_schedule(schedule)
    loop, stages = tuple(range(ranks)), schedule.num_stages
    if FAMILIES[family].both_ways:
        mirrored = [tuple(sorted({stage, stages - 1 - stage})) for stage in range(stages)]
        assert schedule.holders == tuple(mirrored if micro_batches > 1 else ((s,) for s in range(stages)))
    else:
        looped = FAMILIES[family].order in ("loop", "delayed")
        assert schedule.rank_of_stage == ((loop if looped else loop + loop[::-1]) * stages)[:stages]
    assert schedule.micro_batches == micro_batches
    assert parse_schedule(str(schedule)) == schedule


def test_one_forward_one_backward_is_written_as_in_the_docstring() -> None:
    assert str(build_schedule("1f1b", 2, 3)) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2"


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_interleaving_has_the_warm_up_of_megatron(ranks: int, chunks: int, groups: int) -> None:
    """(v - 1) p + 2 (p - 1 - i) forwards, then one forward and one backward in turn, chunks in groups of p."""
    schedule = build_schedule("interleaved", ranks, groups * ranks, chunks)
    total = groups * ranks * chunks
    for rank, actions in enumerate(schedule.ranks):
        warm_up = min(total, (chunks - 1) * ranks + 2 * (ranks - 1 - rank))
        kinds = "".join(action.kind for action in actions)
        assert kinds == "F" * warm_up + "FB" * (total - warm_up) + "B" * warm_up
        forwards = [(a.stage // ranks, a.micro_batch) for a in actions if a.kind == "F"]
        assert forwards[:ranks] == [(0, index) for index in range(ranks)]
        assert forwards[ranks : 2 * ranks] == (
            [(1, index) for index in range(ranks)] if chunks > 1 else forwards[ranks : 2 * ranks]
        )


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 2), (4, 8), (4, 5), (6, 12)])
def test_micro_batches_in_flight(ranks: int, micro_batches: int) -> None:
    def capped(caps: list[int]) -> list[int]:
        return [min(cap, micro_batches) for cap in caps]

    behind = [ranks - 1 - rank for rank in range(ranks)]
    assert most_in_flight(build_schedule("gpipe", ranks, micro_batches)) == [micro_batches] * ranks
    assert most_in_flight(build_schedule("1f1b", ranks, micro_batches)) == capped([n + 1 for n in behind])
    assert most_in_flight(build_schedule("zb-h1", ranks, micro_batches)) == capped([n + 1 for n in behind])
    assert most_in_flight(build_schedule("zb-h2", ranks, micro_batches)) == capped([2 * n + 1 for n in behind])


@pytest.mark.parametrize(("family", "most"), [("zb-h1", 4), ("zb-h2", 7)])
def test_zero_bubble_keeps_its_memory(family: str, most: int) -> None:
    """A micro-batch counts until its W: p of them in ZB-H1, 2p - 1 in ZB-H2, on every rank (arXiv 2401.10241)."""
    for actions in build_schedule(family, 4, 16).ranks:
        held = list(itertools.accumulate({"F": 1, "I": 0, "W": -1}[action.kind] for action in actions))
        assert max(held) == most


@pytest.mark.parametrize("family", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 5), (4, 4), (4, 11)])
def test_step_of_equal_stages_is_m_plus_p_minus_1_micro_batches(family: str, ranks: int, micro_batches: int) -> None:
    times = StageTimes(
        forward=(2.0,) * ranks, backward=(3.0,) * ranks, weight=(1.0,) * ranks, send=(0.0,) * (ranks - 1)
    )
    assert makespan(build_schedule(family, ranks, micro_batches), times) == 6.0 * (micro_batches + ranks - 1)


@pytest.mark.parametrize(("ranks", "groups", "chunks"), [(2, 1, 2), (3, 2, 2), (4, 2, 3)])
def test_interleaving_divides_the_bubble_by_the_chunks(ranks: int, groups: int, chunks: int) -> None:
    stages = ranks * chunks
    times = StageTimes(
        forward=(1.0,) * stages, backward=(2.0,) * stages, weight=(0.0,) * stages, send=(0.0,) * (stages - 1)
    )
    schedule = build_schedule("interleaved", ranks, groups * ranks, chunks)
    assert makespan(schedule, times) == 3.0 * (groups * ranks * chunks + ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize(("forward", "backward", "weight"), [(1.0, 1.0, 1.0), (1.2, 1.1, 0.9), (1.0, 1.0, 0.5)])
def test_zero_bubble_closed_forms(ranks: int, forward: float, backward: float, weight: float) -> None:
    """Bubbles (p - 1)(F + B - W) and (p - 1)(F + B - 2W), arXiv 2401.10241 table 2, of the rank that has most."""
    micro_batches = 4 * ranks
    times = StageTimes(
        forward=(forward,) * ranks, backward=(backward,) * ranks, weight=(weight,) * ranks, send=(0.0,) * (ranks - 1)
    )
    work = micro_batches * (forward + backward + weight)
    first = makespan(build_schedule("zb-h1", ranks, micro_batches), times) - work
    assert first == pytest.approx((ranks - 1) * (forward + backward - weight))
    one_f_one_b = makespan(build_schedule("1f1b", ranks, micro_batches), times) - work
    assert first < one_f_one_b


def test_equal_times_leave_no_bubble_in_the_second_zero_bubble_schedule() -> None:
    """Ranks start p - 1 forwards apart and none waits: the last one ends that much later than its work."""
    times = StageTimes.equal(4)
    assert makespan(build_schedule("zb-h2", 4, 12), times) == 3 * 12 + 3


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 4), (3, 6), (4, 12), (6, 12)])
def test_the_vee_has_no_bubble_in_the_memory_of_one_forward_one_backward(ranks: int, micro_batches: int) -> None:
    """From 2p micro-batches up: rank i starts i forwards late and ends as late; 2p chunks are p whole stages."""
    schedule = build_schedule("zb-v", ranks, micro_batches, 2)
    assert makespan(schedule, StageTimes.equal(2 * ranks)) == 6 * micro_batches + ranks - 1
    for actions in schedule.ranks:
        held = itertools.accumulate({"F": 1, "I": 0, "W": -1}[action.kind] for action in actions)
        assert max(held) == min(2 * ranks, 2 * micro_batches)


def orders(stage: int, micro_batches: int, split: bool) -> Iterator[tuple[PipeAction, ...]]:
    """All orders of a rank in which each kind takes the micro-batches in turn, and F, I, W of one in turn too."""
    kinds = "FIW" if split else "FB"
    for word in set(itertools.permutations(kinds * micro_batches)):
        count = dict.fromkeys(kinds, 0)
        actions = []
        for kind in word:
            actions.append(PipeAction(stage, kind, count[kind]))  # type: ignore[arg-type]
            count[kind] += 1
            if any(count[later] > count[earlier] for earlier, later in itertools.pairwise(kinds)):
                break
        else:
            yield tuple(actions)


@pytest.mark.parametrize(("family", "micro_batches", "slope"), [("1f1b", 2, 1), ("1f1b", 3, 1), ("gpipe", 3, None)])
def test_no_order_within_the_caps_is_faster(family: str, micro_batches: int, slope: int | None) -> None:
    times = StageTimes(forward=(1.0, 1.0), backward=(2.0, 2.0), weight=(0.0, 0.0), send=(0.25,))
    best = min(
        makespan(schedule, times)
        for pair in itertools.product(*(list(orders(stage, micro_batches, False)) for stage in (0, 1)))
        if runs(schedule := Schedule(pair)) and within(schedule, slope)
    )
    assert makespan(build_schedule(family, 2, micro_batches), times) == best


def test_no_order_within_the_memory_beats_zero_bubble() -> None:
    """ZB-H1 of two ranks and two micro-batches, against all orders that keep its memory."""
    times = StageTimes.equal(2)
    ours = build_schedule("zb-h1", 2, 2)
    best = min(
        makespan(schedule, times)
        for pair in itertools.product(*(list(orders(stage, 2, True)) for stage in (0, 1)))
        if runs(schedule := Schedule(pair)) and within(schedule, 1)
    )
    assert makespan(ours, times) == best


def runs(schedule: Schedule) -> bool:
    try:
        runnable_order(schedule)
    except ConfigurationError:
        return False
    return True


def within(schedule: Schedule, slope: int | None) -> bool:
    if slope is None:
        return True
    ranks = len(schedule.ranks)
    caps = [slope * (ranks - 1 - rank) + 1 for rank in range(ranks)]
    return all(most <= cap for most, cap in zip(most_in_flight(schedule), caps, strict=True))


SENDS = {
    (0.0, 0.0): "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2F3,2I3,2W1,2W2,2W3",
    (1.0, 0.0): "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2W1,2W2,2F3,2I3,2W3",
    (0.0, 1.0): "2F0,2I0,2F1,2I1,2W0,2W1,2F2,2I2,2W2,2F3,2I3,2W3",
}


@pytest.mark.parametrize("sends", SENDS)
def test_a_rank_fills_the_time_that_its_inputs_are_under_way(sends: tuple[float, float]) -> None:
    """The last rank waits for its fourth forward, longer where it comes from afar, and computes weights meanwhile."""
    times = replace(StageTimes.equal(3), send=sends)
    schedule = list_schedule(FAMILIES["zb-h1"], 3, 4, 1, times)
    assert str(schedule).splitlines()[2] == SENDS[sends]


def test_a_memory_limit_is_kept_and_one_too_small_is_refused() -> None:
    times = StageTimes.equal(4)
    policy = replace(FAMILIES["zb-2p"], fill="greedy")
    tight = list_schedule(policy, 4, 12, 1, times, memory_limit=4.0)
    check_schedule(tight)
    for actions in tight.ranks:
        assert max(itertools.accumulate({"F": 1, "I": 0, "W": -1}[action.kind] for action in actions)) <= 4
    with pytest.raises(ConfigurationError, match="too few"):
        list_schedule(policy, 4, 12, 1, times, memory_limit=0.5)


@pytest.mark.parametrize(
    "arguments",
    [
        ("gems", 2, 2),
        ("1f1b", 0, 2),
        ("1f1b", 2, 0),
        ("zb-h1", 2, 2, 2),
        ("zb-v", 2, 2),
        ("hanayo", 2, 2, 3),
        ("chimera", 3, 4),
    ],
)
def test_impossible_schedules_are_refused(arguments: tuple[str, int, int]) -> None:
    with pytest.raises(ConfigurationError):
        build_schedule(*arguments)


MUTATIONS = {
    "lost": (lambda actions: actions[:-1], "must be F B"),
    "twice": (lambda actions: (*actions, actions[-1]), "must be F B"),
    "backward first": (lambda actions: (*actions[1:], actions[0]), "must be F B|deadlock"),
    "late forward": (lambda actions: (*actions[:2], *actions[3:6], actions[2], *actions[6:]), "deadlock"),
    "other rank's stage": (lambda actions: (actions[0]._replace(stage=1), *actions[1:]), "stands on ranks"),
}


@pytest.mark.parametrize("mutation", sorted(MUTATIONS))
def test_the_checker_sees_a_damaged_schedule(mutation: str) -> None:
    damage, message = MUTATIONS[mutation]
    schedule = build_schedule("1f1b", 3, 4)
    check_schedule(schedule, [3, 2, 1])
    with pytest.raises(ConfigurationError, match=message):
        check_schedule(Schedule((damage(schedule.ranks[0]), *schedule.ranks[1:])))


def test_the_checker_sees_weights_before_their_backward_and_too_much_memory() -> None:
    schedule = build_schedule("zb-h1", 2, 2)
    swapped = parse_schedule(str(schedule).replace("1I0", "x").replace("1W0", "1I0").replace("x", "1W0"))
    with pytest.raises(ConfigurationError, match="F W I"):
        check_schedule(swapped)
    with pytest.raises(ConfigurationError, match=r"rank 1 holds 4.*cap is 1"):
        check_schedule(build_schedule("gpipe", 2, 4), [4, 1])


def test_ranks_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"deadlock.*0B0, 1F1"):
        runnable_order(parse_schedule("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))


def test_outputs_go_where_inputs_are_awaited() -> None:
    for action in build_schedule("interleaved", 2, 4, 2):
        target = receiver(action, 4)
        if target is not None:
            kind = action.kind
            assert producer(PipeAction(target, kind, action.micro_batch), 4) == (
                action.stage,
                "F" if kind == "F" else "gradient",
            )
