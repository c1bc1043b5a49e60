"""Best first: the optimum over all candidates is found, and only what can hold it is refined."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from autopar.planner.mesh_search import Stage, best_first


class Fakes:
    """Candidates with given (bounds of the stages..., objective); None for an objective: the last stage fails."""

    def __init__(self, **stages: tuple[float | None, ...]) -> None:
        self.work: list[str] = []
        self.candidates = {name: self._stages(name, values) for name, values in stages.items()}

    def _stages(self, name: str, values: tuple[float | None, ...]) -> Iterator[Stage[str, str]]:
        *bounds, objective = values
        for bound in bounds:
            self.work.append(name)
            assert bound is not None
            yield Stage(bound=bound)
        self.work.append(name)
        if objective is None:
            raise LookupError(name)
        yield Stage(bound=objective, objective=objective, result=name)


def test_the_candidate_with_the_lowest_bound_is_refined_first_and_hopeless_ones_are_dropped_unsolved() -> None:
    fakes = Fakes(a=(1.0, 9.0, 10.0), b=(2.0, 4.0, 5.0), c=(1.0, 6.0, 7.0))
    outcome = best_first(fakes.candidates, seconds=1e9)
    assert outcome.best is not None
    assert (outcome.best.result, outcome.bound, outcome.timed_out) == ("b", 5.0, False)
    assert fakes.work == ["a", "b", "c", "a", "c", "b", "b"]
    assert {entry.key: (entry.state, entry.bound) for entry in outcome.entries} == {
        "a": ("open", 9.0),
        "b": ("finished", 5.0),
        "c": ("open", 6.0),
    }


def test_the_optimum_of_random_candidates_is_found() -> None:
    draw = random.Random(0)
    for _ in range(200):
        stages = {}
        for name in "abcdefgh"[: draw.randint(1, 8)]:
            stages[name] = tuple(sorted(draw.randint(0, 9) for _ in range(draw.randint(1, 4))))
        outcome = best_first(Fakes(**stages).candidates, seconds=1e9)
        optimum = min(values[-1] for values in stages.values())
        assert outcome.best is not None
        assert (outcome.best.objective, outcome.bound) == (optimum, optimum)


def test_a_bound_that_is_too_high_would_lose_the_optimum() -> None:
    """The mutation that the test above must catch: a stage that claims more than is true."""
    outcome = best_first(Fakes(a=(1.0, 3.0), b=(4.0, 2.0)).candidates, seconds=1e9)
    assert outcome.best is not None
    assert outcome.best.objective == 3.0


def test_a_bound_never_falls() -> None:
    outcome = best_first(Fakes(a=(5.0, 3.0, 6.0)).candidates, seconds=1e9)
    assert outcome.entries[0].bound == 6.0


def test_a_candidate_that_fails_keeps_its_bound_and_the_others_go_on() -> None:
    outcome = best_first(Fakes(a=(1.0, None), b=(2.0, 3.0)).candidates, seconds=1e9, failures=(LookupError,))
    assert outcome.best is not None
    assert (outcome.best.result, outcome.bound) == ("b", 1.0)
    assert isinstance(outcome.entries[0].error, LookupError)


def test_other_exceptions_are_not_swallowed() -> None:
    with pytest.raises(LookupError):
        best_first(Fakes(a=(1.0, None)).candidates, seconds=1e9, failures=(ValueError,))


def test_a_refused_candidate_is_never_touched_and_says_why() -> None:
    fakes = Fakes(a=(1.0, 2.0), b=(1.0, 3.0))
    outcome = best_first(fakes.candidates, seconds=1e9, refuse=lambda key: "too large" if key == "a" else "")
    assert (outcome.entries[0].state, outcome.entries[0].refusal, outcome.bound) == ("refused", "too large", 0.0)
    assert "a" not in fakes.work


def test_at_the_time_limit_the_best_finished_one_is_returned_with_the_bound_over_all() -> None:
    ticks = iter(range(100))
    fakes = Fakes(a=(1.0, 5.0), b=(2.0, 4.0), c=(3.0, 4.5))
    outcome = best_first(fakes.candidates, seconds=4.5, clock=lambda: next(ticks))
    assert outcome.best is not None
    assert (outcome.best.result, outcome.bound, outcome.timed_out) == ("a", 2.0, True)


def test_when_time_is_up_a_candidate_that_was_opened_is_finished() -> None:
    fakes = Fakes(a=(2.0, None), b=(3.0, 4.0), c=(0.0, 1.0))
    ticks = iter(range(100))
    outcome = best_first(fakes.candidates, seconds=2.5, clock=lambda: next(ticks), failures=(LookupError,))
    assert outcome.best is not None
    assert (outcome.best.result, outcome.bound, outcome.timed_out) == ("b", 0.0, True)
    assert fakes.work == ["a", "b", "a", "b"]


def test_among_equal_bounds_the_most_promising_comes_first() -> None:
    fakes = Fakes(a=(1.0, 5.0), b=(1.0, 4.0), c=(1.0, 3.0))
    best_first(fakes.candidates, seconds=1e9, promise={"a": (2.0,), "b": (1.0,), "c": (3.0,)}.__getitem__)
    assert fakes.work[:3] == ["b", "a", "c"]


def test_a_bound_that_follows_for_another_candidate_drops_it_unsolved() -> None:
    def fine() -> Iterator[Stage[str, str]]:
        yield Stage(bound=1.0)
        yield Stage(bound=5.0, objective=5.0, result="fine", implied={"coarse": 5.0})

    fakes = Fakes(coarse=(2.0, 6.0))
    outcome = best_first({"fine": fine(), **fakes.candidates}, seconds=1e9, promise=lambda key: (float(key != "fine"),))
    assert outcome.best is not None
    assert (outcome.best.key, outcome.bound, fakes.work) == ("fine", 5.0, ["coarse"])


def test_known_floors_and_a_known_objective_leave_only_what_can_be_better() -> None:
    fakes = Fakes(a=(1.0, 5.0), b=(2.0, 3.0), c=(2.5, 3.5))
    outcome = best_first(fakes.candidates, seconds=1e9, floors={"a": 4.0, "b": 2.0, "c": 3.2}, below=4.0)
    assert outcome.best is not None
    assert (outcome.best.result, fakes.work) == ("b", ["b", "b"])
    nothing = best_first(Fakes(a=(1.0, 5.0)).candidates, seconds=1e9, below=1.0 + 1e-12)
    assert nothing.best is None


def test_what_could_win_less_than_the_gap_of_the_best_is_left_and_counts_in_the_bound() -> None:
    def loose() -> Iterator[Stage[str, str]]:
        yield Stage(bound=9.995, objective=10.0, result="loose")

    fakes = Fakes(other=(9.996, 9.997))
    outcome = best_first({"loose": loose(), **fakes.candidates}, seconds=1e9)
    assert outcome.best is not None
    assert (outcome.best.key, outcome.bound, fakes.work) == ("loose", 9.995, ["other"])


def test_a_candidate_that_would_help_is_refined_first() -> None:
    def fine() -> Iterator[Stage[str, str]]:
        yield Stage(bound=1.0, after="coarse")
        fakes.work.append("fine")
        yield Stage(bound=2.0, objective=2.0, result="fine")

    fakes = Fakes(coarse=(1.5, 3.0))
    outcome = best_first({"fine": fine(), **fakes.candidates}, seconds=1e9)
    assert outcome.best is not None
    assert (outcome.best.key, fakes.work) == ("fine", ["coarse", "coarse", "fine"])
