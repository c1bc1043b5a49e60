import math

from autopar.planner.solver.deadline import Deadline


def test_no_limit_leaves_for_ever_and_a_past_one_leaves_nothing() -> None:
    assert Deadline.after(None).left() == math.inf
    assert Deadline.after(0.0).left() == 0.0
    assert 9.0 < Deadline.after(10.0).left() <= 10.0
