import numpy as np
import pytest

from autopar.planner.solver import Edge, MemoryRow, Problem, evaluate

TWO = (np.array([1.0, 2.0]), np.array([3.0, 1.0]))


def test_evaluate_adds_nodes_edges_and_bytes() -> None:
    problem = Problem(
        node_costs=TWO,
        edges=(Edge(source=0, target=1, costs=np.array([[0.0, 5.0], [7.0, 0.5]])),),
        memory_rows=(
            MemoryRow(name="m", bytes={1: np.array([10.0, 20.0])}, budget_bytes=1.0, constant_bytes=3.0),
        ),
    )
    assert evaluate(problem, np.array([1, 0])) == (2.0 + 3.0 + 7.0, (13.0,))


def test_a_matrix_of_the_wrong_shape_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"node 0 \(mm\) -> node 1 \(add\).*\(2, 3\)"):
        Problem(
            node_costs=TWO, edges=(Edge(source=0, target=1, costs=np.zeros((2, 3))),), names=("mm", "add")
        )


def test_infinite_costs_are_refused_with_the_alternative() -> None:
    with pytest.raises(ValueError, match="FORBIDDEN"):
        Problem(node_costs=(np.array([np.inf, 1.0]),), edges=())


def test_an_edge_to_nowhere_and_a_node_without_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        Problem(node_costs=TWO, edges=(Edge(source=0, target=2, costs=np.zeros((2, 2))),))
    with pytest.raises(ValueError, match="d >= 1"):
        Problem(node_costs=(np.zeros(0),), edges=())


def test_bytes_need_one_number_per_label() -> None:
    row = MemoryRow(name="stage 0", bytes={0: np.zeros(3)}, budget_bytes=1.0)
    with pytest.raises(ValueError, match="stage 0"):
        Problem(node_costs=TWO, edges=(), memory_rows=(row,))
