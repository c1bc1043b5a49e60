"""A Triton kernel inside an operator is split by its registered rule; one without an operator is refused."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.rules.engine import uncovered
from tests.rules.custom_operators import OPERATORS, SCALED_SILU, Block, forget_rules
from tests.rules.test_custom_operators import calls_of, check_parity, planned

pytest.importorskip("triton", reason="Triton is not installed")

from tests.rules import triton_operators

_forget_rules = pytest.fixture(autouse=True)(forget_rules)


@pytest.mark.parametrize("devices", [2, 4])
def test_an_operator_around_a_triton_kernel_is_one_operator_and_is_split(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPERATORS, "triton", triton_operators.scale_columns)
    torch.manual_seed(0)
    model, x = Block("triton"), torch.randn(12, 8)
    program = capture(model, (x,), {})
    calls = calls_of(program, "autopar_door.scale_columns.default")
    assert len(calls) == 2, "the kernel and its gradient are not one operator each"
    assert len(uncovered(program)) == 2
    autopar.register_rule("autopar_door::scale_columns", f"{SCALED_SILU} ; linear: x -")
    assert not uncovered(program)
    plan = planned(model, x, devices)
    assert all(plan.operators[call].axes != (None,) for call in calls)
    check_parity(program, plan, model, x)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrap_triton"])
def test_a_kernel_outside_of_an_operator_is_refused_with_the_way_to_wrap_it(wrapped: bool) -> None:
    with pytest.raises(CaptureError, match=r"outside of an operator.*torch\.library\.triton_op.*register_rule"):
        capture(triton_operators.BareKernel(wrapped), (torch.randn(4, 8),), {})
