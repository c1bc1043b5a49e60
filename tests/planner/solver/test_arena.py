import numpy as np

from autopar.planner.solver.arena import Arena


def test_equal_content_has_one_token_and_shape_counts() -> None:
    arena = Arena()
    first = arena.token(np.arange(6.0))
    assert arena.token(np.arange(6.0)) == first
    assert arena.token(np.arange(6.0).reshape(2, 3)) != first
    assert arena.token(np.arange(6)) != first


def test_a_computation_on_equal_operands_runs_once() -> None:
    arena, calls = Arena(), []

    def double(values: np.ndarray) -> tuple[np.ndarray]:
        calls.append(1)
        return (2.0 * values,)

    results = {arena.derive("double", double, arena.token(np.ones(3))) for _ in range(3)}
    assert len(results) == len(calls) == 1


def test_additions_to_a_fork_do_not_reach_the_original() -> None:
    arena = Arena()
    arena.token(np.zeros(1))
    fork = arena.fork()
    assert fork.token(np.zeros(1)) == 0
    assert fork.token(np.ones(1)) == arena.token(np.full(1, 2.0)) == 1
