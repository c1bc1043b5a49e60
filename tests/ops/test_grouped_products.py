"""Products of runs of rows, and that experts take them where torch has no grouped kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ops import experts
from autopar.ops.grouped_products import grouped_outer, grouped_product

RUNS = {"all rows": ([2, 0, 3], 5), "rows behind": ([0, 3, 1], 6), "none": ([0, 0, 0], 2)}


@pytest.mark.parametrize(("counts", "length"), RUNS.values(), ids=RUNS)
def test_each_run_has_its_matrix_and_gradients_are_those_of_autograd(counts: list[int], length: int) -> None:
    torch.manual_seed(1)
    rows, matrices = torch.randn(length, 4).double().requires_grad_(), torch.randn(3, 4, 5).double().requires_grad_()
    runs, behind = torch.tensor(counts), length - sum(counts)
    parts = rows[: sum(counts)].split(counts)
    products = [part @ matrix for part, matrix in zip(parts, matrices, strict=True)]
    expected = torch.cat([*products, rows.new_zeros(behind, 5)])
    grad = torch.randn(length, 5).double()
    wanted = torch.autograd.grad(expected, (rows, matrices), grad)
    torch.testing.assert_close(grouped_product(rows.detach(), matrices.detach(), runs), expected.detach())
    torch.testing.assert_close(grouped_product(grad, matrices.detach().transpose(1, 2), runs), wanted[0])
    torch.testing.assert_close(grouped_outer(rows.detach(), grad, runs), wanted[1])


@pytest.mark.parametrize("has_kernel", [False, True])
def test_experts_take_them_where_torch_has_no_kernel(has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def spy(name: str) -> None:
        found = getattr(experts, name)

        def run(*arguments: Tensor) -> Any:
            called.append(name)
            return found(*arguments)

        monkeypatch.setattr(experts, name, run)

    spy("grouped_product")
    spy("grouped_outer")
    monkeypatch.setattr(experts, "_has_kernel", lambda first, second: has_kernel)
    x, grad, weight = torch.randn(6, 8).bfloat16(), torch.randn(6, 16).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    ids = torch.tensor([2, 0, 2, 1, 7, 0])
    experts.expert_linear(x, weight, ids, False)
    experts.expert_outer(x, grad, ids, 3, True)
    assert called == ([] if has_kernel else ["grouped_product", "grouped_outer"])


def test_fake_tensors_are_those_of_the_operators() -> None:
    rows, matrices, counts = torch.randn(6, 4), torch.randn(3, 5, 4).transpose(1, 2), torch.tensor([1, 2, 0])
    torch.library.opcheck(grouped_product, (rows, matrices, counts))
    torch.library.opcheck(grouped_outer, (rows, torch.randn(6, 5), counts))
