"""Operators that capture writes as smaller ones give what torch gives, values and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from autopar.capture.decompositions import decomposition_table
from autopar.capture.embedding_bags import embedding_bag
from autopar.capture.trace import capture
from autopar.rules.engine import uncovered

BAGS = [
    (mode, is_table, padding, is_weighted, has_end)
    for mode, is_table, padding, is_weighted, has_end in itertools.product(
        ("sum", "mean", "max"), (False, True), (None, 2, -1), (False, True), (False, True)
    )
    if not (is_weighted and mode != "sum") and not (is_table and has_end)
]


@pytest.mark.parametrize(("mode", "is_table", "padding", "is_weighted", "has_end"), BAGS)
def test_embedding_bags_are_lookups_and_sums(
    mode: str, is_table: bool, padding: int | None, is_weighted: bool, has_end: bool
) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (5, 3) if is_table else (12,))
    ids[0] = 2  # a bag of padding only, an empty bag behind it
    options: dict[str, Any] = {"mode": mode, "padding_idx": padding, "include_last_offset": has_end}
    options["offsets"] = None if is_table else torch.tensor([0, 1, 1, 7, 12] if has_end else [0, 1, 1, 7])
    options["per_sample_weights"] = torch.randn(ids.shape, dtype=torch.float64) if is_weighted else None
    tables = [torch.randn(9, 4, dtype=torch.float64).requires_grad_()]
    tables.append(tables[0].detach().clone().requires_grad_())
    expected, found = functional.embedding_bag(ids, tables[0], **options), embedding_bag(ids, tables[1], **options)
    torch.testing.assert_close(found, expected)
    for result in (expected, found):
        (result * torch.arange(4)).sum().backward()
    torch.testing.assert_close(tables[1].grad, tables[0].grad)


def decomposed(function: Callable[..., Any], *values: Tensor) -> list[str]:
    """Operators that the function becomes; fails unless these compute the same."""
    graph = make_fx(function, decomposition_table=decomposition_table(), tracing_mode="fake")(*values)
    torch.testing.assert_close(graph(*values), function(*values))
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("is_row", [True, False])
def test_masked_scatter_is_a_lookup(is_row: bool) -> None:
    torch.manual_seed(0)
    mask = torch.rand(4, 6) > 0.5 if is_row else torch.rand(4, 6, 8) > 0.5
    source = torch.randn(20, 8) if is_row else torch.randn(190)

    def run(x: Tensor, mask: Tensor, source: Tensor) -> tuple[Tensor, ...]:
        x, source = x.detach().requires_grad_(), source.detach().requires_grad_()
        y = x.masked_scatter(mask.unsqueeze(-1).expand(4, 6, 8) if is_row else mask, source)
        return y.detach(), *torch.autograd.grad((y * y).sum(), (x, source))

    operators = decomposed(run, torch.randn(4, 6, 8), mask, source)
    assert not any("masked_scatter" in operator for operator in operators)


def test_foreach_operators_are_taken_apart() -> None:
    def run(a: Tensor, b: Tensor) -> list[Tensor]:
        pair = [a, b]
        found = [*torch._foreach_mul(pair, 2.0), *torch._foreach_norm(pair, 1), *torch._foreach_pow(2.0, pair)]
        found += torch._foreach_add(pair, [b.sum(), a.sum()], alpha=2)
        found += torch._foreach_addcmul(pair, pair, pair, [1.0, 2.0])
        found += torch._foreach_maximum(pair, 1.5)
        return found + list(torch._foreach_lerp(pair, pair, 0.3))

    assert not any("foreach" in operator for operator in decomposed(run, torch.rand(3) + 1, torch.rand(4, 2) + 1))


def test_products_with_a_summand_are_taken_apart() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        summed = torch.addbmm(torch.ones(6, 6), x, x.mT, beta=2, alpha=3)
        return summed, torch.addmv(torch.ones(6), x[0], torch.ones(8)), torch.rot90(x)

    found = set(decomposed(run, torch.randn(4, 6, 8)))
    assert not {"aten.addbmm.default", "aten.addmv.default", "aten.rot90.default"} & found


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(16, 4, mode="sum")

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def test_a_model_with_bags_has_rules_for_everything() -> None:
    program = capture(Bags(), (torch.zeros(8, 3, dtype=torch.long),), loss_fn=lambda output, batch: output.sum())
    assert not uncovered(program)
    assert not any("embedding_bag" in str(node.target) for node in program.graph.nodes)
