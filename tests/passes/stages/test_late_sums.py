"""Backward cut before its last sums: what is left is linear in what was there, and nothing else is moved."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.lowering.micro_batch_graphs import adding_to_totals
from autopar.passes.stages.late_sums import cut_late_sums, last_pass

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
ALL_REDUCE, SCATTER = c10d.all_reduce.default, c10d.reduce_scatter_tensor.default


class _Backward:
    """A graph that is written call by call."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta = {"dtype": torch.float32}

    def call(self, target: Any, *args: Any, dtype: torch.dtype = torch.float32, copy: bool = False) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {"dtype": dtype, "phase": "backward"} | ({"redistributes": "w"} if copy else {})
        return node

    def summed(self, x: fx.Node, target: Any = ALL_REDUCE, how: str = "sum") -> fx.Node:
        extra = () if target is ALL_REDUCE else (2,)
        return self.call(c10d.wait_tensor.default, self.call(target, x, how, *extra, "dp", copy=True), copy=True)

    def module(self, *gradients: fx.Node) -> fx.GraphModule:
        self.graph.output(gradients)
        return fx.GraphModule({}, self.graph)


def _targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_an_all_reduce_waits() -> None:
    back = _Backward()
    cut = cut_late_sums(back.module(back.summed(back.call(aten.neg.default, back.x))))
    assert cut is not None
    assert _targets(cut.unreduced) == [aten.neg.default]
    assert _targets(cut.reduce) == [ALL_REDUCE, c10d.wait_tensor.default]


def test_two_sums_in_a_row_wait_together() -> None:
    back = _Backward()
    cut = cut_late_sums(back.module(back.summed(back.summed(back.x, SCATTER))))
    assert cut is not None
    assert _targets(cut.reduce) == [SCATTER, c10d.wait_tensor.default, ALL_REDUCE, c10d.wait_tensor.default]


def test_a_gradient_that_would_grow_is_cut_behind_the_scatter() -> None:
    back = _Backward()
    cut = cut_late_sums(back.module(back.summed(back.summed(back.x, SCATTER))), growing=False)
    assert cut is not None
    assert _targets(cut.reduce) == [ALL_REDUCE, c10d.wait_tensor.default]
    back = _Backward()
    assert cut_late_sums(back.module(back.summed(back.x, SCATTER)), growing=False) is None


def test_nothing_that_is_not_linear_is_moved() -> None:
    back = _Backward()
    between = back.call(aten.relu.default, back.summed(back.x))
    cut = cut_late_sums(back.module(back.summed(between)))
    assert cut is not None
    assert aten.relu.default in _targets(cut.unreduced)
    back = _Backward()
    assert cut_late_sums(back.module(back.summed(back.x, how="max"))) is None


def test_a_gradient_is_added_up_in_its_own_dtype() -> None:
    back = _Backward()
    narrow = back.call(aten._to_copy.default, back.x, dtype=torch.bfloat16)
    reduced = back.call(ALL_REDUCE, narrow, "sum", "dp", dtype=torch.bfloat16)
    assert cut_late_sums(back.module(back.call(aten._to_copy.default, reduced))) is None


def test_gradients_before_the_first_are_sent_whole() -> None:
    back = _Backward()
    sent, kept = back.summed(back.x), back.summed(back.call(aten.neg.default, back.x))
    cut = cut_late_sums(back.module(sent, kept), 1)
    assert cut is not None
    assert cut.positions == (1,)
    assert _targets(cut.unreduced).count(ALL_REDUCE) == 1


def test_the_last_backward_sums_totals_behind_the_gradients_that_they_take() -> None:
    backward = _Backward()
    first, second = backward.call(aten.neg.default, backward.x), backward.call(aten.exp.default, backward.x)
    late = cut_late_sums(backward.module(backward.summed(first), second))
    assert late is not None
    added, totals = adding_to_totals(late.unreduced)
    last = last_pass(added, late, totals)
    assert totals == (0, 1)
    (summed, plain) = last.graph.output_node().args[0]  # type: ignore[misc]
    assert summed.target is c10d.wait_tensor.default
    assert summed.args[0].args[0].target is aten.add_.Tensor
    assert plain.target is aten.add_.Tensor, "nothing sums it"
    assert ALL_REDUCE not in _targets(added)


def test_the_last_pass_sums_totals_of_other_passes_too() -> None:
    """As W of a stage does, whose I has added up some gradients."""
    backward = _Backward()
    first, second = backward.call(aten.neg.default, backward.x), backward.call(aten.exp.default, backward.x)
    late = cut_late_sums(backward.module(backward.summed(first), backward.summed(second)))
    assert late is not None
    half = fx.Graph()
    x, total = half.placeholder("x"), half.placeholder("total_1")
    half.call_function(aten.add_.Tensor, (total, half.call_function(aten.exp.default, (x,))))
    half.output(())
    last = last_pass(fx.GraphModule({}, half), late, (0, 1))
    assert [node.target for node in last.graph.find_nodes(op="placeholder")] == ["x", "total_1", "total_0"]
    sums = last.graph.output_node().args[0]
    assert [one.args[0].args[0].target for one in sums] == ["total_0", aten.add_.Tensor]
