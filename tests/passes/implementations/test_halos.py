"""Convolutional networks whose rows are split: halos travel, loss and gradients stay those of the plain module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.capture import capture
from autopar.layouts.placement import Mesh
from autopar.rules.rule import Rule
from tests.passes.hand_plans import hand_plan, picked, run_plan, tensors_of

FLAT, SQUARE = Mesh(("tp",), (4,)), Mesh(("dp", "tp"), (2, 2))


class ConvNet(nn.Module):
    """Strided, depthwise and dilated convolutions with a batch norm; odd channels, so that only rows can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.depthwise = nn.Conv2d(5, 5, 5, padding=2, groups=5)
        self.dilated = nn.Conv2d(5, 3, 3, padding=2, dilation=2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.stem(x)))
        hidden = nn.functional.avg_pool2d(nn.functional.gelu(self.depthwise(hidden)) + hidden, 2)
        return ((self.dilated(hidden) - y) ** 2).mean()


class Case:
    """The network on a batch of one, its program and the plain loss and gradients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = ConvNet().double()
        inputs = {"x": torch.randn(1, 3, 32, 16).double(), "y": torch.randn(1, 3, 8, 4).double()}
        self.program = capture(self.module, (), inputs)
        self.tensors = {name: value.clone() for name, value in tensors_of(self.program, self.module, inputs).items()}
        loss = self.module(**inputs)
        loss.backward()
        self.loss = loss.detach()
        self.gradients = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def error(self, pick: Callable[[fx.Node, Rule], Sequence[str | None]], mesh: Mesh) -> tuple[float, set[str]]:
        """(largest relative error of loss and gradients, operators that the plan splits)."""
        operators = picked(self.program, mesh, pick)
        plan = hand_plan(self.program, mesh, operators)
        results = run_plan(self.program, plan, self.tensors)
        loss = next(output.name for output in self.program.outputs if output.role == "loss")
        errors = [float((results.outputs[loss] - self.loss).abs() / self.loss.abs())]
        least = 1e-6 * max(float(g.norm()) for g in self.gradients.values())  # a bias before a norm has no gradient
        errors += [
            float((results.gradients[n] - g).norm()) / max(float(g.norm()), least) for n, g in self.gradients.items()
        ]
        targets = {
            node.meta["operator"]: str(node.target) for node in self.program.graph.nodes if "operator" in node.meta
        }
        return max(errors), {targets[name] for name, entry in operators.items() if any(entry.axes)}


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def rows(node: fx.Node, rule: Rule) -> list[str | None]:
    """The first spatial dim of an image: `s0` of windows, the first position of a batch norm, dim 2 of the rest."""
    image = next((dims for dims in (*rule.inputs, *rule.outputs) if dims is not None and len(dims) == 4), None)
    return [image[2][0] if image is not None and image[2] else None]


def columns(node: fx.Node, rule: Rule) -> str | None:
    image = next((dims for dims in (*rule.inputs, *rule.outputs) if dims is not None and len(dims) == 4), None)
    return image[3][0] if image is not None and image[3] else None


def test_a_network_split_along_its_rows_agrees_with_the_plain_one(case: Case) -> None:
    error, split = case.error(rows, FLAT)
    assert error < 1e-9
    assert {"aten.convolution.default", "aten.convolution_backward.default", "aten.avg_pool2d.default"} <= split
    assert {"aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm_backward.default"} <= split


def test_a_network_split_along_rows_and_columns_agrees_with_the_plain_one(case: Case) -> None:
    error, split = case.error(lambda node, rule: [*rows(node, rule), columns(node, rule)], SQUARE)
    assert error < 1e-9
    assert "aten.convolution_backward.default" in split


def test_a_network_without_exchanged_edges_is_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.ops.halo.edges", lambda x, dim, runs: _zeros_like_edges(x, dim, runs))
    error, _ = case.error(rows, FLAT)
    assert error > 1e-3


def _zeros_like_edges(x: Tensor, dim: int, runs: Sequence[tuple[int, int]]) -> Tensor:
    moved = x.movedim(dim, 0)
    return moved.new_zeros((sum(length for _, length in runs), *moved.shape[1:]))
