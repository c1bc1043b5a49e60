"""Best first: the optimum over all candidates is found, and only what can hold it is refined."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from autopar.planner.meshes.mesh_search import MeshOutcome, Stage, best_first


class Fakes:
    """`Candidates` with given (bounds of the stages..., objective); None for an objective: the last stage fails.

    special: candidates whose stages are made elsewhere; they come first."""

    def __init__(
        self,
        special: Mapping[str, Iterator[Stage[str, str]]] | None = None,
        refused: str = "",
        promises: Mapping[str, float] | None = None,
        **stages: tuple[float | None, ...],
    ) -> None:
        self.work: list[str] = []
        self._candidates = {**(special or {}), **{name: self._stages(name, values) for name, values in stages.items()}}
        self._refused, self._promises = refused, promises or {}

    def stages(self, key: str) -> Iterator[Stage[str, str]]:
        return self._candidates[key]

    def refusal(self, key: str) -> str:
        return "too large" if key == self._refused else ""

    def estimate(self, key: str) -> tuple[float, ...]:
        return (self._promises[key],) if key in self._promises else ()

    def search(self, seconds: float = 1e9, **options: Any) -> MeshOutcome[str, str]:
        return best_first(list(self._candidates), self, seconds=seconds, **options)

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
    outcome = fakes.search()
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
        outcome = Fakes(**stages).search()
        optimum = min(values[-1] for values in stages.values())
        assert outcome.best is not None
        assert (outcome.best.objective, outcome.bound) == (optimum, optimum)


def test_a_bound_that_is_too_high_would_lose_the_optimum() -> None:
    """The mutation that the test above must catch: a stage that claims more than is true."""
    outcome = Fakes(a=(1.0, 3.0), b=(4.0, 2.0)).search()
    assert outcome.best is not None
    assert outcome.best.objective == 3.0


def test_a_bound_never_falls() -> None:
    outcome = Fakes(a=(5.0, 3.0, 6.0)).search()
    assert outcome.entries[0].bound == 6.0


def test_a_candidate_that_fails_keeps_its_bound_and_the_others_go_on() -> None:
    outcome = Fakes(a=(1.0, None), b=(2.0, 3.0)).search(failures=(LookupError,))
    assert outcome.best is not None
    assert (outcome.best.result, outcome.bound) == ("b", 1.0)
    assert isinstance(outcome.entries[0].error, LookupError)


def test_other_exceptions_are_not_swallowed() -> None:
    with pytest.raises(LookupError):
        Fakes(a=(1.0, None)).search(failures=(ValueError,))


def test_a_refused_candidate_is_never_touched_and_says_why() -> None:
    fakes = Fakes(refused="a", a=(1.0, 2.0), b=(1.0, 3.0))
    outcome = fakes.search()
    assert (outcome.entries[0].state, outcome.entries[0].refusal, outcome.bound) == ("refused", "too large", 0.0)
    assert "a" not in fakes.work


def test_at_the_time_limit_the_best_finished_one_is_returned_with_the_bound_over_all() -> None:
    ticks = iter(range(100))
    fakes = Fakes(a=(1.0, 5.0), b=(2.0, 4.0), c=(3.0, 4.5))
    outcome = fakes.search(seconds=4.5, clock=lambda: next(ticks))
    assert outcome.best is not None
    assert (outcome.best.result, outcome.bound, outcome.timed_out) == ("a", 2.0, True)


def test_when_time_is_up_a_candidate_that_was_opened_is_finished() -> None:
    fakes = Fakes(a=(2.0, None), b=(3.0, 4.0), c=(0.0, 1.0))
    ticks = iter(range(100))
    outcome = fakes.search(seconds=2.5, clock=lambda: next(ticks), failures=(LookupError,))
    assert outcome.best is not None
    assert (outcome.best.result, outcome.bound, outcome.timed_out) == ("b", 0.0, True)
    assert fakes.work == ["a", "b", "a", "b"]


def test_among_equal_bounds_the_most_promising_comes_first() -> None:
    fakes = Fakes(promises={"a": 2.0, "b": 1.0, "c": 3.0}, a=(1.0, 5.0), b=(1.0, 4.0), c=(1.0, 3.0))
    fakes.search()
    assert fakes.work[:3] == ["b", "a", "c"]


@pytest.mark.parametrize("last_bits", [1 - 2e-16, 1 + 2e-16])
def test_last_bits_of_a_bound_do_not_choose(last_bits: float) -> None:
    fakes = Fakes(promises={"a": 2.0, "b": 1.0}, a=(last_bits, 5.0), b=(1.0, 4.0))
    fakes.search()
    assert fakes.work[2] == "b"


def test_a_bound_that_follows_for_another_candidate_drops_it_unsolved() -> None:
    def fine() -> Iterator[Stage[str, str]]:
        yield Stage(bound=1.0)
        yield Stage(bound=5.0, objective=5.0, result="fine", implied={"coarse": 5.0})

    fakes = Fakes({"fine": fine()}, promises={"fine": 0.0, "coarse": 1.0}, coarse=(2.0, 6.0))
    outcome = fakes.search()
    assert outcome.best is not None
    assert (outcome.best.key, outcome.bound, fakes.work) == ("fine", 5.0, ["coarse"])


def test_known_floors_and_a_known_objective_leave_only_what_can_be_better() -> None:
    fakes = Fakes(a=(1.0, 5.0), b=(2.0, 3.0), c=(2.5, 3.5))
    outcome = fakes.search(floors={"a": 4.0, "b": 2.0, "c": 3.2}, below=4.0)
    assert outcome.best is not None
    assert (outcome.best.result, fakes.work) == ("b", ["b", "b"])
    nothing = Fakes(a=(1.0, 5.0)).search(below=1.0 + 1e-12)
    assert nothing.best is None


def test_what_could_win_less_than_the_gap_of_the_best_is_left_and_counts_in_the_bound() -> None:
    def loose() -> Iterator[Stage[str, str]]:
        yield Stage(bound=9.995, objective=10.0, result="loose")

    fakes = Fakes({"loose": loose()}, other=(9.996, 9.997))
    outcome = fakes.search()
    assert outcome.best is not None
    assert (outcome.best.key, outcome.bound, fakes.work) == ("loose", 9.995, ["other"])


def test_a_candidate_that_would_help_is_refined_first() -> None:
    def fine() -> Iterator[Stage[str, str]]:
        yield Stage(bound=1.0, after="coarse")
        fakes.work.append("fine")
        yield Stage(bound=2.0, objective=2.0, result="fine")

    fakes = Fakes({"fine": fine()}, coarse=(1.5, 3.0))
    outcome = fakes.search()
    assert outcome.best is not None
    assert (outcome.best.key, fakes.work) == ("fine", ["coarse", "coarse", "fine"])
