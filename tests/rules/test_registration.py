from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autopar.errors import ConfigurationError
from autopar.rules import engine
from autopar.rules.engine import rule_for
from autopar.rules.registration import register_rule
from tests.rules.execution import capture_call


@torch.library.custom_op("autopar_test::relu_mm", mutates_args=())
def relu_mm(left: Tensor, right: Tensor) -> Tensor:
    return (left @ right).relu()


@torch.library.custom_op("autopar_test::scaled_mm", mutates_args=())
def scaled_mm(left: Tensor, right: Tensor, scale: float = 2.0) -> Tensor:
    return scale * (left @ right)


@torch.library.custom_op("autopar_test::shifted_sum", mutates_args=())
def shifted_sum(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim)


@pytest.fixture(autouse=True)
def _forget_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine, "_REGISTERED", {})
    yield
    engine.rule_of.cache_clear()


def test_a_right_rule_is_taken() -> None:
    register_rule("autopar_test::scaled_mm", "m k, k n -> m n ; flops: 2*m*k*n")
    captured = capture_call(torch.ops.autopar_test.scaled_mm.default, (torch.ones(4, 6), torch.ones(6, 8)), {})
    rule = rule_for(captured.node)
    assert rule is not None
    assert rule.reductions == {"k": ("sum",)}


def test_a_contraction_behind_a_relu_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'k' split in 2.*\[k\]"):
        register_rule("autopar_test::relu_mm", "m k, k n -> m n")
    register_rule("autopar_test::relu_mm", "m [k], [k] n -> m n")


def test_a_wrong_reduction_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="differs"):
        register_rule("autopar_test::scaled_mm", "m k, k n -> m n ; k: max")


def test_a_false_linearity_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not linear"):
        register_rule("autopar_test::relu_mm", "m [k], [k] n -> m n ; linear: x -")


def test_attributes_without_default_need_an_example() -> None:
    with pytest.raises(ConfigurationError, match="example"):
        register_rule("autopar_test::shifted_sum", "... -> ... ; reduce: dim")
    register_rule("autopar_test::shifted_sum", "... -> ... ; reduce: dim", example=(torch.randn(6, 12), 1))


def test_unknown_operators_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no operator"):
        register_rule("autopar_test::missing", "m -> m")
