"""What is refused before state moves, and when parameters change hands."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Mesh, Replicate
from autopar.plans.plan_value import DEVICE, HOST
from autopar.runtime.parameters import from_local
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.weights.move_schedule import check_memory, check_of_every_rank
from autopar.runtime.weights.moved_state import hands_change

CPU = torch.device("cpu")


def test_hands_change_where_one_rank_holds_all_and_another_does_not() -> None:
    whole, stage = ["parameter a", "parameter b", "buffer c"], ["parameter b", "gradient b"]
    assert hands_change([whole, stage, whole, whole])
    assert hands_change([whole, whole, whole, stage])
    assert not hands_change([whole, [*whole, "gradient a"], whole[:2]])


def test_a_tensor_that_would_go_between_host_and_device_is_refused() -> None:
    check_memory(torch.zeros(2), "w", HOST, torch.device("meta"))
    check_memory(torch.zeros(2), "w", DEVICE, CPU)
    with pytest.raises(ConfigurationError, match=r"w lies on cpu, and under the other plan on meta .*autopar\.save"):
        check_memory(torch.zeros(2), "w", DEVICE, torch.device("meta"))
    with pytest.raises(ConfigurationError, match="w lies on meta, and under the other plan on cpu"):
        check_memory(torch.zeros(2, device="meta"), "w", HOST, torch.device("meta"))


def test_a_state_that_may_be_of_a_block_is_refused() -> None:
    for value in (3, 0.1, torch.tensor(7.0), torch.ones(1), None, {"betas": (0.9, 0.99)}):
        check_of_every_rank(value, "step of w")
    with pytest.raises(ConfigurationError, match=r"average of w is a plain tensor of shape \(3,\)"):
        check_of_every_rank(torch.zeros(3), "average of w")
    groups = ProcessGroups(Mesh(("dp",), (1,)), "cpu")
    with pytest.raises(ConfigurationError, match="directions of w holds DTensors inside of a list"):
        check_of_every_rank([from_local(torch.zeros(3), (3,), (Replicate(),), groups)], "directions of w")
