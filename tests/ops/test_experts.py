"""Expert products equal one matrix product per row, forward and backward; torch's grouped kernel path, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.ops import experts
from autopar.ops.experts import (
    block_expert_linear,
    expert_linear,
    expert_order,
    expert_outer,
    rows_at,
    sorted_expert_linear,
    sorted_expert_outer,
)

NUM_EXPERTS = 4
IDS = {
    "uneven": torch.tensor([3, 0, 0, 3, 1, 0, 3]),
    "one expert": torch.full((7,), 2),
    "no expert": torch.tensor([-1, 4, 0, -100, 1, 9, 3]),
}


def row_by_row(x: Tensor, weight: Tensor, expert_ids: Tensor) -> Tensor:
    rows = [x[t] @ weight[e] if 0 <= e < len(weight) else x[t] @ weight[0] * 0 for t, e in enumerate(expert_ids)]
    return torch.stack(rows)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("expert_ids", IDS.values(), ids=IDS.keys())
def test_forward_and_backward_equal_row_by_row(expert_ids: Tensor, transposed: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(NUM_EXPERTS, 5, 3, dtype=torch.float64, requires_grad=True)
    stored = weight.transpose(1, 2) if transposed else weight
    found, expected = expert_linear(x, stored, expert_ids, transposed), row_by_row(x, weight, expert_ids)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad(found, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_rows_and_experts_without_each_other_are_written_too() -> None:
    x, weight = torch.randn(7, 5), torch.randn(NUM_EXPERTS, 5, 3)
    torch.use_deterministic_algorithms(True)  # fills what is not written with nan
    try:
        found = expert_linear(x, weight, IDS["no expert"], False)
        gradient = expert_outer(x, torch.randn(7, 3), IDS["one expert"], NUM_EXPERTS, False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [bool((row == 0.0).all()) for row in found] == [True, True, False, True, False, True, False]
    assert [bool((each == 0.0).all()) for each in gradient] == [True, True, False, True]


def test_operators_keep_their_promises_to_torch() -> None:
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(NUM_EXPERTS, 5, 3, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(expert_linear, (x, weight, IDS["no expert"], False))
    x, weight, grad = x.detach(), weight.detach(), torch.randn(7, 3).double()
    torch.library.opcheck(expert_outer, (x, grad, IDS["uneven"], NUM_EXPERTS, True))
    torch.library.opcheck(expert_order, (IDS["no expert"], NUM_EXPERTS, 1))
    counts = expert_order(IDS["no expert"], NUM_EXPERTS, 0)[2]
    torch.library.opcheck(sorted_expert_linear, (x, weight, counts, False))
    torch.library.opcheck(sorted_expert_outer, (x, grad, counts, True))


def test_the_order_of_a_block_of_experts() -> None:
    ids = torch.tensor([3, 0, 2, 3, 1, -1, 2])
    order, places, counts = expert_order(ids, 2, 2)
    assert (order.tolist(), counts.tolist()) == ([2, 6, 0, 3, 1, 4, 5], [2, 2])
    assert rows_at(rows_at(ids, order), places).equal(ids)


def test_blocks_of_experts_sum_to_the_whole_and_unshifted_ids_do_not() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 5).double(), torch.randn(NUM_EXPERTS, 5, 3).double()
    expert_ids = IDS["uneven"]
    whole = expert_linear(x, weight, expert_ids, False)
    blocks = [block_expert_linear(x, weight[start : start + 3], expert_ids, False, start) for start in (0, 3)]
    torch.testing.assert_close(sum(blocks), whole)
    unshifted = [expert_linear(x, weight[start : start + 3], expert_ids, False) for start in (0, 3)]
    assert not torch.allclose(unshifted[0] + unshifted[1], whole)


def test_no_rows_at_all() -> None:
    x, weight, none = torch.randn(0, 5), torch.randn(NUM_EXPERTS, 5, 3), torch.zeros(0, dtype=torch.int64)
    assert expert_linear(x, weight, none, False).shape == (0, 3)
    assert not expert_outer(x, torch.randn(0, 3), none, NUM_EXPERTS, False).any()


@pytest.mark.parametrize("expert_ids", IDS.values(), ids=IDS.keys())
def test_the_grouped_kernel_computes_the_same(expert_ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that CUDA takes for bf16, made on a CPU; small integers make bf16 exact."""
    torch.manual_seed(0)
    x, grad = (torch.randint(-3, 4, (7, size)).bfloat16() for size in (8, 16))
    weight = torch.randint(-3, 4, (NUM_EXPERTS, 8, 16)).bfloat16()
    expected = expert_linear(x, weight, expert_ids, False), expert_outer(x, grad, expert_ids, NUM_EXPERTS, False)
    monkeypatch.setattr(experts, "_has_kernel", lambda first, second: True)
    torch.testing.assert_close(expert_linear(x, weight, expert_ids, False), expected[0])
    torch.testing.assert_close(expert_outer(x, grad, expert_ids, NUM_EXPERTS, False), expected[1])
