import numpy as np
import pytest

from autopar.planner.solver import Certificate
from autopar.planner.solver.solution import Dominate, Eliminate, Fix, relative_gap


def test_every_kind_of_step_survives_a_dict() -> None:
    steps = (
        Dominate(node=3, kept=np.array([0, 2])),
        Fix(messages=np.array([0.5, -1.0]), cutoff=2.0, kept={1: np.array([4])}),
        Eliminate(node=3),
    )
    certificate = Certificate(
        kind="messages",
        proven_bound=1.0,
        ceiling=np.inf,
        multipliers=(0.5,),
        steps=steps,
        messages=np.ones(2),
    )
    data = certificate.to_dict()
    assert Certificate.from_dict(data).to_dict() == data


def test_an_unknown_step_is_refused() -> None:
    data = Certificate(kind="messages", proven_bound=0.0, ceiling=1.0, messages=np.zeros(0)).to_dict()
    with pytest.raises(ValueError, match="estimate"):
        Certificate.from_dict(data | {"steps": [["estimate", 1]]})


def test_the_gap_is_relative_and_never_negative() -> None:
    assert relative_gap(2.0, 1.0) == 0.5
    assert relative_gap(2.0, 2.5) == 0.0
    assert relative_gap(0.0, 0.0) == 0.0
