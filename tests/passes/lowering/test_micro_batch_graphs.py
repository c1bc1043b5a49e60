"""Graphs of one part: gradients are added where they are made, and random numbers are those of the whole batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autopar._compat import tree_flatten
from autopar.graphs.live_ranges import memory_events
from autopar.ops.dropout_operator import dropout_by_index
from autopar.passes.lowering.micro_batch_graphs import adding_to_totals, drawing_for, without_statistics
from autopar.passes.lowering.step_halves import split_forward_backward
from autopar.program import Input, Output, Program

aten = torch.ops.aten


def _lowered() -> Program:
    """loss = sum(x * w) / n of the whole; n = sum(x); dw = x * (t / n)."""
    graph = fx.Graph()

    def call(phase: str, target: object, *args: object, shape: tuple[int, ...] = ()) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta = {"phase": phase, "local_shape": shape, "dtype": torch.float32, "operator": node.name}
        return node

    inputs = []
    for name, role, shape in (
        ("w", "parameter", (4,)),
        ("x", "input", (4,)),
        ("t", "tangent", ()),
        ("n", "statistic", ()),
    ):
        node = graph.placeholder(name)
        phase = "backward" if role == "tangent" else "forward"
        node.meta = {"phase": phase, "local_shape": shape, "dtype": torch.float32, "operator": name}
        inputs.append((node, Input(role=role, name=name, shape=shape, dtype=torch.float32)))  # type: ignore[arg-type]
    w, x, t, n = (node for node, _ in inputs)
    product = call("forward", aten.mul.Tensor, x, w, shape=(4,))
    loss = call("forward", aten.div.Tensor, call("forward", aten.sum.default, product), n)
    count = call("forward", aten.sum.default, x)
    scaled = call("backward", aten.div.Tensor, t, n)
    gradient = call("backward", aten.mul.Tensor, x, scaled, shape=(4,))
    graph.output((loss, count, gradient))
    roles = (("loss", "loss"), ("statistic", "n"), ("gradient", "w"))
    spec = tree_flatten(())[1]
    return Program(
        graph_module=fx.GraphModule({}, graph),
        inputs=tuple(entry for _, entry in inputs),
        outputs=tuple(Output(role=role, name=name) for role, name in roles),  # type: ignore[arg-type]
        in_spec=spec,
        tensor_leaves=(0,),
        out_spec=spec,
        output_leaves=(0,),
        training=True,
    )


def test_statistics_are_split_off_and_gradients_added_where_they_are_made() -> None:
    program = _lowered()
    partition, statistics = without_statistics(program, split_forward_backward(program))
    assert statistics is not None
    assert partition.backward is not None
    backward, totals = adding_to_totals(partition.backward)
    assert totals == (0,)
    x, w, total = torch.tensor([1.0, 2.0, 0.0, 1.0]), torch.arange(4.0), torch.ones(4)
    (count,) = statistics(w, x, torch.zeros(()))
    assert float(count) == 4.0
    loss, *saved = partition.forward(w, x, torch.tensor(8.0))
    assert float(loss) == float((x * w).sum() / 8)
    backward(*saved, torch.tensor(0.5), total)
    assert torch.equal(total, 1 + x * 0.5 / 8)


def test_a_fresh_gradient_dies_where_it_is_added() -> None:
    program = _lowered()
    partition = split_forward_backward(program)
    whole = memory_events(partition)
    of_part, _ = without_statistics(program, partition)
    assert of_part.backward is not None
    parts = memory_events(replace(of_part, backward=adding_to_totals(of_part.backward)[0]))
    last = max(event.last_index for event in whole)
    assert any(event.bytes == 16 and event.last_index == last for event in whole)
    end = max(event.last_index for event in parts)
    assert not any(event.bytes == 16 and event.last_index == end and event.first_index > 4 for event in parts)


def _dropping() -> fx.GraphModule:
    graph = fx.Graph()
    x, seed = graph.placeholder("x"), graph.placeholder("seed")
    node = graph.call_function(dropout_by_index, (x, 0.5, seed, 3, (((2, 2),), ((0, 3),)), (4, 3)))
    node.meta["operator"] = "drop#0"
    graph.output(node)
    return fx.GraphModule({}, graph)


def test_the_second_part_of_two_pieces_draws_the_numbers_of_its_samples() -> None:
    """Rank 1 of 2 holds samples 2 and 3 of a part of 4; in the whole batch of 8 they are 6 and 7."""
    drawn = drawing_for(_dropping(), {"drop#0": 0}, part=1, count=2, pieces=2)
    seed, whole = torch.tensor(5), torch.ones(8, 3)
    expected, _ = dropout_by_index(whole, 0.5, seed, 3, (((0, 8),), ((0, 3),)), (8, 3))
    assert torch.equal(drawn(torch.ones(2, 3), seed)[0], expected[6:])
    other = drawing_for(_dropping(), {"drop#0": 0}, part=0, count=2, pieces=2)
    assert torch.equal(other(torch.ones(2, 3), seed)[0], expected[4:6])


def test_operators_that_do_not_draw_per_sample_stay() -> None:
    graph_module = _dropping()
    assert str(drawing_for(graph_module, {}, part=1, count=2, pieces=1).graph) == str(graph_module.graph)
