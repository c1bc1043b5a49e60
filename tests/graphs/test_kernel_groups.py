import operator
import random

import networkx
import pytest
import torch
from torch import fx

from autopar.errors import ConfigurationError
from autopar.graphs.kernel_groups import group_reads_writes, kernel_groups

aten = torch.ops.aten


def _layer() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """x -> mm -> view -> gelu -> mul(gelu, gelu) -> mm2 ; sum and mean of mul ; add behind the sum"""
    graph = fx.Graph()
    n: dict[str, fx.Node] = {}
    n["x"], n["w"] = graph.placeholder("x"), graph.placeholder("w")
    n["mm"] = graph.call_function(aten.mm.default, (n["x"], n["w"]))
    n["view"] = graph.call_function(aten.view.default, (n["mm"], [2, 2, 4]))
    n["gelu"] = graph.call_function(aten.gelu.default, (n["view"],))
    n["mul"] = graph.call_function(aten.mul.Tensor, (n["gelu"], n["view"]))
    n["flat"] = graph.call_function(aten.view.default, (n["mul"], [4, 4]))
    n["mm2"] = graph.call_function(aten.mm.default, (n["flat"], n["w"]))
    n["sum"] = graph.call_function(aten.sum.dim_IntList, (n["mul"], [0]))
    n["add"] = graph.call_function(aten.add.Tensor, (n["sum"], n["sum"]))
    graph.output((n["mm2"], n["add"]))
    return graph, n


def test_eager_runs_each_node_alone_and_views_not_at_all() -> None:
    graph, n = _layer()
    groups = kernel_groups(graph, "eager")
    assert set(groups) == {n[k] for k in ("mm", "gelu", "mul", "mm2", "sum", "add")}
    assert len(set(groups.values())) == 6
    traffic = group_reads_writes(graph, groups)
    assert traffic[n["mul"]].reads == (n["gelu"], n["view"])
    assert traffic[n["add"]].reads == (n["sum"],)
    assert all(t.writes == (0,) for t in traffic.values())


def test_inductor_fuses_chains_with_their_trailing_reduction() -> None:
    graph, n = _layer()
    groups = kernel_groups(graph, "inductor")
    assert groups[n["gelu"]] == groups[n["mul"]] == groups[n["sum"]]
    assert len({groups[n[k]] for k in ("mm", "gelu", "mm2", "add")}) == 4


def test_a_group_reads_an_operand_once_and_writes_only_what_leaves() -> None:
    graph, n = _layer()
    traffic = group_reads_writes(graph, kernel_groups(graph, "inductor"))
    assert traffic[n["gelu"]].reads == (n["view"],)
    assert traffic[n["gelu"]].writes == ()
    assert traffic[n["mul"]].reads == ()
    assert traffic[n["mul"]].writes == (0,)
    assert traffic[n["sum"]].reads == ()
    assert traffic[n["sum"]].writes == (0,)
    assert traffic[n["mm2"]].reads == (n["flat"], n["w"])


def test_no_group_crosses_the_phases() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.relu.default, (x,))
    b = graph.call_function(aten.neg.default, (a,))
    graph.output(b)
    b.meta["phase"] = "backward"
    assert len(set(kernel_groups(graph, "inductor").values())) == 2
    assert len(set(kernel_groups(graph, "inductor", phase=lambda node: "forward").values())) == 1


def test_a_group_never_waits_for_a_kernel_that_waits_for_it() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    a = graph.call_function(aten.relu.default, (x,))
    mm = graph.call_function(aten.mm.default, (a, w))
    add = graph.call_function(aten.add.Tensor, (a, mm))
    graph.output(add)
    groups = kernel_groups(graph, "inductor")
    assert len({groups[a], groups[mm], groups[add]}) == 3


def _random_graph(seed: int) -> fx.Graph:
    draw, graph = random.Random(seed), fx.Graph()
    values = [graph.placeholder(name) for name in "abc"]
    for _ in range(25):
        x, y = draw.choice(values[-8:]), draw.choice(values[-8:])
        operator_, arguments = draw.choice(
            [
                (aten.add.Tensor, (x, y)),
                (aten.mul.Tensor, (x, y)),
                (aten.gelu.default, (x,)),
                (aten.mm.default, (x, y)),
                (aten.sum.dim_IntList, (x, [0])),
                (aten.view.default, (x, [4])),
            ]
        )
        values.append(graph.call_function(operator_, arguments))
    graph.output(tuple(values[-3:]))
    return graph


@pytest.mark.parametrize("seed", range(30))
def test_the_kernels_of_any_graph_can_run_one_after_the_other(seed: int) -> None:
    graph = _random_graph(seed)
    groups = kernel_groups(graph, "inductor")
    kernel = {node: groups.get(node, f"free {index}") for index, node in enumerate(graph.nodes)}
    order = networkx.DiGraph(
        (kernel[source], kernel[node])
        for node in graph.nodes
        for source in node.all_input_nodes
        if kernel[source] != kernel[node]
    )
    # a view between two members of a group belongs to it
    for index, node in enumerate(graph.nodes):
        if node not in groups and node.op == "call_function":
            source = kernel[node.all_input_nodes[0]]
            order = networkx.contracted_nodes(order, source, f"free {index}", self_loops=False)
            kernel = {n: source if k == f"free {index}" else k for n, k in kernel.items()}
    assert networkx.is_directed_acyclic_graph(order)
    traffic = group_reads_writes(graph, groups)
    assert set(traffic) == set(groups)
    eager = group_reads_writes(graph, kernel_groups(graph, "eager"))
    assert all(set(traffic[node].reads) <= set(eager[node].reads) for node in groups)


def test_outputs_of_a_tuple_are_written_where_they_are_used() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    dropout = graph.call_function(aten.native_dropout.default, (x, 0.1, True))
    y = graph.call_function(operator.getitem, (dropout, 0))
    mask = graph.call_function(operator.getitem, (dropout, 1))
    z = graph.call_function(aten.neg.default, (y,))
    graph.output((z, mask))
    dropout.meta["val"] = (torch.empty(2), torch.empty(2, dtype=torch.bool))
    groups = kernel_groups(graph, "inductor")
    assert set(groups) == {dropout, z}
    assert groups[dropout] == groups[z]
    traffic = group_reads_writes(graph, groups)
    assert traffic[dropout].writes == (1,)
    assert traffic[z].reads == ()
    assert traffic[z].writes == (0,)


def test_two_slices_of_one_tensor_are_two_reads() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    left, right = (graph.call_function(aten.slice.Tensor, (x, 0, i, i + 2)) for i in (0, 2))
    flat = graph.call_function(aten.view.default, (x, [-1]))
    add = graph.call_function(aten.add.Tensor, (left, right))
    mul = graph.call_function(aten.mul.Tensor, (flat, x))
    graph.output((add, mul))
    traffic = group_reads_writes(graph, kernel_groups(graph, "eager"))
    assert traffic[add].reads == (left, right)
    assert traffic[mul].reads == (flat,)  # a whole view and its base are the same bytes


def test_collectives_are_not_kernels() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    reduced = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    waited = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,))
    y = graph.call_function(aten.neg.default, (waited,))
    graph.output(y)
    groups = kernel_groups(graph, "inductor")
    assert set(groups) == {y}
    assert group_reads_writes(graph, groups)[y].reads == (waited,)


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="eager"):
        kernel_groups(fx.Graph(), "tvm")
