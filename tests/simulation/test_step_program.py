"""The bytes that a rank holds throughout a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.hardware.cluster import Cluster
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.simulation.step_program import StepProgram


def stage(parameter: str, joined: float, gathered: float) -> Any:
    """A stage with one parameter of 400 bytes, outputs that wait and weights that are gathered once per step."""
    entry = SimpleNamespace(name=parameter, role="parameter", on_host=False, shape=(10, 10), dtype=torch.float32)
    lowered = SimpleNamespace(
        program=SimpleNamespace(inputs=[entry]), context=SimpleNamespace(kept_totals=1), prepared=None, last=None
    )
    return SimpleNamespace(
        lowered=lowered, cluster=Cluster.parse("1 H100-SXM"), joined_bytes=joined, gathered_bytes={"mm#0": gathered}
    )


def held(*stages: Any) -> float:
    """The bytes of the states of a rank with these stages; AdamW takes 8 bytes of each element, a gradient 4."""
    program = StepProgram.__new__(StepProgram)
    each = StateBytes(gradient=4.0, optimizer=8.0, step_traffic=28.0)
    program.state_bytes = dict.fromkeys(("first.weight", "second.weight"), each)
    return program._states_of(stages).bytes


def test_outputs_that_wait_for_the_other_micro_batches_are_held_throughout() -> None:
    states = held(stage("first.weight", 0.0, 0.0))
    assert states == pytest.approx(100 * (4 + 4 + 8))
    assert held(stage("first.weight", 96.0, 0.0)) - states == pytest.approx(96.0)


def test_the_stages_of_a_rank_add_up() -> None:
    found = held(stage("first.weight", 96.0, 7.0), stage("second.weight", 32.0, 5.0))
    assert found == pytest.approx(2 * 100 * (4 + 4 + 8) + 96 + 7 + 32 + 5)
