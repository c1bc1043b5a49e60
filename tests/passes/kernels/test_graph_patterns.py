"""Patterns find operators by structure: orders, views, casts and collectives that may be missing."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.kernels.graph_patterns import pattern

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class _Graph:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x, self.y = (self.graph.placeholder(name) for name in "xy")
        for node in (self.x, self.y):
            node.meta = {"local_shape": (4,), "dtype": torch.bfloat16}

    def call(self, target: Any, *args: Any, dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {"local_shape": (4,), "dtype": dtype}
        return node


SUM = pattern("out = mul(exp(cast(x)), scale)")


def test_products_match_in_both_orders_and_casts_may_be_missing() -> None:
    g = _Graph()
    cast = g.call(aten._to_copy.default, g.x, dtype=torch.float32)
    for operand in (cast, g.x):
        for order in (lambda a, b: (a, b), lambda a, b: (b, a)):
            found = SUM.find("out", g.call(aten.mul.Tensor, *order(g.call(aten.exp.default, operand), g.y)))
            assert found is not None
            assert (found["x"], found["scale"]) == (g.x, g.y)


def test_other_operators_numbers_and_options_do_not_match() -> None:
    g = _Graph()
    assert SUM.find("out", g.call(aten.mul.Tensor, g.call(aten.log.default, g.x), g.y)) is None
    half = pattern("out = mul(x, 0.5)")
    assert half.find("out", g.call(aten.mul.Tensor, g.x, 0.25)) is None
    assert half.find("out", g.call(aten.mul.Tensor, g.x, 0.5)) is not None
    plain = pattern("out = gelu(x)")
    assert plain.find("out", g.call(aten.gelu.default, g.x, approximate="tanh")) is None


def test_a_name_is_one_value_whatever_views_look_at_it() -> None:
    g = _Graph()
    square = pattern("out = mul(x, x)")
    view = g.call(aten.reshape.default, g.x, [2, 2])
    assert square.find("out", g.call(aten.mul.Tensor, g.x, view)) is not None
    assert square.find("out", g.call(aten.mul.Tensor, g.x, g.y)) is None


def test_a_reduction_over_ranks_may_stand_between() -> None:
    g = _Graph()
    top = pattern('out = sub(x, reduced(amax(x, [1], True), "max"))')
    largest = g.call(aten.amax.default, g.x, [1], True)
    for operation, is_found in (("max", True), ("sum", False)):
        started = g.call(c10d.all_reduce.default, g.call(aten.contiguous.default, largest), operation, "tp")
        waited = g.call(c10d.wait_tensor.default, started)
        assert (top.find("out", g.call(aten.sub.Tensor, g.x, waited)) is not None) == is_found
    assert top.find("out", g.call(aten.sub.Tensor, g.x, largest)) is not None


def test_an_addition_may_stand_between() -> None:
    g = _Graph()
    sum_of = pattern("out = exp(plus(neg(x), other))")
    negative = g.call(aten.neg.default, g.x)
    alone = sum_of.find("out", g.call(aten.exp.default, negative))
    assert alone is not None
    assert alone["other"] is None
    added = sum_of.find("out", g.call(aten.exp.default, g.call(aten.add.Tensor, g.y, negative)))
    assert added is not None
    assert added["other"] is g.y


def test_only_widening_casts_are_walked_through() -> None:
    g = _Graph()
    wide = pattern("out = neg(wider(x))")
    up = g.call(aten._to_copy.default, g.x, dtype=torch.float32)
    found = wide.find("out", g.call(aten.neg.default, g.call(aten.reshape.default, up, [2, 2], dtype=torch.float32)))
    assert found is not None
    assert found["x"] is g.x
    down = g.call(aten._to_copy.default, up)
    kept = wide.find("out", g.call(aten.neg.default, down))
    assert kept is not None
    assert kept["x"] is down


def test_sums_match_whatever_was_added_first() -> None:
    g = _Graph()
    three = pattern("out = total(exp(x), neg(x), y)")
    exp, neg = g.call(aten.exp.default, g.x), g.call(aten.neg.default, g.x)
    left = g.call(aten.add.Tensor, g.call(aten.add.Tensor, g.y, exp), neg)
    right = g.call(aten.add.Tensor, exp, g.call(aten.add.Tensor, neg, g.y))
    for node in (left, right):
        found = three.find("out", node)
        assert found is not None
        assert found["y"] is g.y
        assert len(found.nodes) == 4
    assert three.find("out", g.call(aten.add.Tensor, exp, neg)) is None
