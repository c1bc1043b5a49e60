from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.solver import Problem, evaluate
from autopar.planner.solver.arena import Arena
from autopar.planner.solver.dual_ascent import Core, DualAscent, class_ranks, schedule_ranks
from autopar.planner.solver.exact import core_of
from autopar.planner.solver.reductions import Graph


def core_from(problem: Problem) -> Core:
    return core_of(
        Graph(Arena(), problem.node_costs, [(e.source, e.target, e.costs) for e in problem.edges])
    )[0]


@pytest.mark.parametrize("ranks", [schedule_ranks, class_ranks])
def test_ranks_keep_neighbours_apart(
    ranks: Callable[[Core], list[int]], layers: Callable[..., Problem]
) -> None:
    core = core_from(layers(5, labels=3, nodes_per_layer=20))
    rank = ranks(core)
    assert all(rank[u] != rank[v] for u, v, _ in core.edges)


def test_class_ranks_sweep_repeated_layers_together(layers: Callable[..., Problem]) -> None:
    few, many = (core_from(layers(count, labels=3, nodes_per_layer=20)) for count in (12, 24))
    assert len(set(class_ranks(few))) == len(set(class_ranks(many)))


@pytest.mark.parametrize("ranks", [schedule_ranks, class_ranks])
@pytest.mark.parametrize("seed", range(25))
def test_bounds_never_exceed_the_optimum_and_roundings_never_beat_it(
    seed: int,
    ranks: Callable[[Core], list[int]],
    random_problem: Callable[..., Problem],
    optimum: Callable[[Problem], float],
) -> None:
    problem = random_problem(seed)
    core, best = core_from(problem), optimum(problem)
    ascent = DualAscent(core, ranks(core))
    bounds = []
    for _ in range(5):
        ascent.sweep(True)
        ascent.sweep(False)
        bounds.append(ascent.label_bounds(ascent.shared_messages()).bound)
    chosen = ascent.round_backward_messages()
    improved = ascent.improve(chosen)
    assert max(bounds) <= best * (1 + 1e-12)
    assert best * (1 - 1e-12) <= ascent.objective(improved) <= ascent.objective(chosen) * (1 + 1e-12)
    assert np.isclose(ascent.objective(improved), evaluate(problem, improved)[0], rtol=1e-12)


def test_any_messages_give_a_valid_bound_for_every_label(random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(11)
    core = core_from(problem)
    ascent = DualAscent(core, schedule_ranks(core))
    messages = np.random.default_rng(0).normal(0.0, 1e-3, ascent.messages.size)
    bounds = ascent.label_bounds(messages)
    for labels in np.ndindex(*(costs.size for costs in problem.node_costs)):
        lowest = bounds.bound + bounds.slack[ascent.starts[:-1] + np.array(labels)].max()
        assert evaluate(problem, np.array(labels))[0] >= lowest - 1e-12


def test_a_tree_is_solved_by_its_bound() -> None:
    rng = np.random.default_rng(5)
    costs = [rng.random(4) for _ in range(9)]
    graph = Graph(Arena(), costs, [((node - 1) // 2, node, rng.random((4, 4))) for node in range(1, 9)])
    core, _ = core_of(graph)
    ascent = DualAscent(core, schedule_ranks(core))
    for _ in range(8):
        ascent.sweep(True)
        ascent.sweep(False)
    bound = ascent.label_bounds(ascent.shared_messages()).bound
    assert np.isclose(bound, ascent.objective(ascent.round_backward_messages()), rtol=1e-12)


def test_matrices_with_equal_rows_and_columns_send_the_same_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    distinct = random.random((9, 6))
    costs = distinct[random.integers(0, 9, 120)][:, random.integers(0, 6, 90)]
    tall = distinct[:, :5][random.integers(0, 9, 120)][:, [2] * 40]
    cores = [(0, 1, costs), (1, 2, random.random((90, 40))), (0, 2, tall)]
    found = []
    for entries in (8_192, 10**9):  # folded, and as they are
        monkeypatch.setattr("autopar.planner.solver.dual_ascent.FOLDED_ENTRIES", entries)
        arena = Arena()
        sizes = [arena.token(np.random.default_rng(size).random(size)) for size in (120, 90, 40)]
        core = Core(arena=arena, costs=tuple(sizes), edges=tuple((u, v, arena.token(matrix)) for u, v, matrix in cores))
        ascent = DualAscent(core, schedule_ranks(core))
        assert any(slot.folded for batch in ascent._batches for slot in batch.slots) == (entries == 8_192)
        for _ in range(3):
            ascent.sweep(True)
            ascent.sweep(False)
        found.append(ascent.messages)
    assert (found[0] == found[1]).all()
