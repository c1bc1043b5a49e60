"""Each tidy pass leaves the values as they are and the graph in one spelling."""

import pytest
import torch
from torch import Tensor

from autopar.errors import CaptureError
from autopar.ops.constant import constant
from autopar.passes.runner import run_passes
from autopar.passes.tidy.equal_splits import equal_splits_to_views
from autopar.passes.tidy.gather_scatters import gather_scatters
from autopar.passes.tidy.inline_constants import inline_constants
from autopar.passes.tidy.merge_equal import merge_equal
from autopar.passes.tidy.moving_rows import moving_rows
from autopar.passes.tidy.one_spelling import one_spelling
from autopar.passes.tidy.operator_paths import name_operators
from autopar.passes.tidy.phases import assign_phases
from autopar.passes.tidy.remove_noise import remove_dead_code, remove_noise
from autopar.passes.tidy.tidy_passes import TIDY_PASSES, TidyContext
from tests.passes.tidy_graphs import NO_BACKWARD, check_pass, names, trace

aten = torch.ops.aten
X = torch.randn(4, 6)
Y = torch.randn(2, 3, 12)


def test_aliases_and_dead_code_go() -> None:
    def function(x: Tensor) -> Tensor:
        x.cos()
        return aten.alias(aten.detach(x).sin())

    assert names(check_pass([remove_noise], function, X)) == ["sin"]


def test_transposes_are_permutes_and_chains_collapse() -> None:
    nodes = check_pass([one_spelling], lambda y: y.transpose(0, 1).transpose(1, 2).sin(), Y)
    assert names(nodes) == ["permute", "sin"]
    assert nodes[0].args[1] == [1, 2, 0]


def test_double_transpose_vanishes() -> None:
    assert names(check_pass([one_spelling], lambda x: x.t().t().sin(), X)) == ["sin"]


def test_reshapes_are_views_with_sizes_written_out() -> None:
    nodes = check_pass([one_spelling], lambda x: x.reshape(-1, 3).unsqueeze(0).squeeze(0).reshape(2, -1).sin(), X)
    assert names(nodes) == ["view", "sin"]
    assert nodes[0].args[1] == [2, 12]


def test_operations_that_change_nothing_vanish() -> None:
    def function(x: Tensor) -> Tensor:
        return aten.slice(aten._to_copy((x + 0) * 1, dtype=torch.float32).expand(4, 6), 0, 0, 100).sin()

    assert names(check_pass([one_spelling], function, X)) == ["sin"]


def test_casts_and_slices_that_change_something_stay() -> None:
    nodes = check_pass([one_spelling], lambda x: (x[1:].double() + 1, (torch.arange(4) * 1.0) + 0), X)
    assert names(nodes) == ["slice", "_to_copy", "add", "arange", "mul"]


def test_split_into_equal_parts_selects_from_a_view() -> None:
    def function(y: Tensor) -> tuple[Tensor, ...]:
        return y.split(4, dim=2)

    nodes = check_pass([equal_splits_to_views], function, Y)
    assert names(nodes) == ["view", "select", "select", "select"]
    assert nodes[0].args[1] == [2, 3, 3, 4]


def test_unequal_split_stays() -> None:
    nodes = check_pass([equal_splits_to_views], lambda y: y.split([4, 8], dim=2), Y)
    assert "select" not in names(nodes)


def test_slices_that_cover_a_dim_select_from_a_view() -> None:
    nodes = check_pass([equal_splits_to_views], lambda x: (x[:, 3:], x[:, :3]), X)
    assert names(nodes).count("select") == 2
    assert names(nodes).count("view") == 1
    assert [node.args[2] for node in nodes if node.target is aten.select.int] == [1, 0]


@pytest.mark.parametrize("second", [slice(2, 4), slice(2, 6), slice(1, 3)])
def test_slices_that_do_not_cover_stay(second: slice) -> None:
    nodes = check_pass([equal_splits_to_views], lambda x: (x[:, :2], x[:, second]), X)
    assert "select" not in names(nodes)


def test_cat_of_equal_parts_stacks_on_a_dim_of_its_own() -> None:
    nodes = check_pass([equal_splits_to_views], lambda x, z: torch.cat([x, z, x], -1), X, torch.randn(4, 6))
    assert names(nodes) == ["view", "view", "view", "cat", "view"]
    assert nodes[3].meta["val"].shape == (4, 3, 6)


def test_cat_of_unequal_parts_stays() -> None:
    assert names(check_pass([equal_splits_to_views], lambda x: torch.cat([x, x[:, :2]], 1), X))[-1] == "cat"


def zeros(*shape: int) -> Tensor:
    return aten.full(shape, 0, dtype=torch.float32)


def test_what_reads_no_value_is_a_factory() -> None:
    nodes = check_pass([one_spelling], lambda x: x + aten.zero(x) + aten.full_like(x, 2), X)
    assert names(nodes) == ["full", "add", "full", "add"]
    assert not nodes[0].all_input_nodes


def test_scattered_slices_are_concatenated() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        first = aten.slice_scatter(zeros(4, 6), a, 1, 0, 2)
        second = aten.slice_scatter(zeros(4, 6), b, 1, 2, 9223372036854775807)
        return second + x + first

    nodes = check_pass([gather_scatters, remove_dead_code], function, X, torch.randn(4, 2), torch.randn(4, 4))
    assert names(nodes) == ["cat", "add"]


def test_scattered_selections_are_stacked() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return aten.select_scatter(zeros(2, 6), a, 0, 1) + aten.select_scatter(zeros(2, 6), b, 0, 0)

    nodes = check_pass([gather_scatters, remove_dead_code], function, torch.randn(6), torch.randn(6))
    assert names(nodes) == ["unsqueeze", "unsqueeze", "cat"]


@pytest.mark.parametrize(("start", "stop"), [(1, 5), (3, 6)])
def test_scatters_that_overlap_or_leave_gaps_stay(start: int, stop: int) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        first = aten.slice_scatter(zeros(4, 6), a, 1, 0, 2)
        return first + aten.slice_scatter(zeros(4, 6), b, 1, start, stop)

    nodes = check_pass([gather_scatters], function, torch.randn(4, 2), torch.randn(4, stop - start))
    assert "cat" not in names(nodes)


def test_the_gradient_of_a_running_sum_is_a_sum_from_the_end() -> None:
    def function(x: Tensor) -> Tensor:
        return x.flip(1).cumsum(-1).flip(-1)

    assert names(check_pass([moving_rows, remove_dead_code], function, X)) == ["reverse_cumsum"]
    assert "reverse_cumsum" not in names(check_pass([moving_rows], lambda x: x.flip(0).cumsum(1).flip(1), X))
    assert "reverse_cumsum" not in names(check_pass([moving_rows], lambda x: x.flip(1).cumsum(0).flip(1), X))


def test_the_gradient_of_a_slice_of_most_rows_is_padding() -> None:
    def function(a: Tensor) -> Tensor:
        return aten.slice_scatter(zeros(4, 6), a, 1, 1, 9223372036854775807)

    nodes = check_pass([moving_rows, remove_dead_code], function, torch.randn(4, 5))
    assert [str(node.target) for node in nodes] == ["aten.constant_pad_nd.default"]
    half = check_pass([moving_rows], lambda a: aten.slice_scatter(zeros(4, 6), a, 1, 3, 6), torch.randn(4, 3))
    assert names(half) == ["full", "slice_scatter"]


def test_equal_operators_are_merged_and_random_ones_are_not() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.ne(0) * x.ne(0) + x.ne(0.5)) * 1.0

    assert names(check_pass([assign_phases, merge_equal], function, X)).count("ne") == 2
    graph_module = trace(lambda x: torch.rand_like(x) + torch.rand_like(x), X)
    graph_module, _ = run_passes(graph_module, [assign_phases, merge_equal], NO_BACKWARD)
    assert names([n for n in graph_module.graph.nodes if n.op == "call_function"]).count("rand_like") == 2


def step(x: Tensor, weight: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    ones = torch.ones(6)
    best, where = (x * weight + ones).max(0)
    return best.sum(), tangent * x.cos() * ones + where


def phases_of_step() -> dict[str, str]:
    graph_module = trace(step, X, torch.randn(4, 6), torch.tensor(1.0))
    placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    context = TidyContext(tangents=frozenset({placeholders[2].name}), num_forward_outputs=1)
    graph_module, _ = run_passes(graph_module, [remove_noise, assign_phases, name_operators], context)
    nodes = [n for n in graph_module.graph.nodes if n.op == "call_function"]
    assert [n.meta["operator"].endswith("/bwd") for n in nodes] == [n.meta["phase"] == "backward" for n in nodes]
    return {n.meta["operator"]: n.meta["phase"] for n in nodes}


def test_phases_follow_the_tangent_and_the_outputs() -> None:
    phases = phases_of_step()
    assert phases["/max#0"] == phases["/sum#0"] == "forward"
    assert phases["/cos#0/bwd"] == "backward"  # used by backward only


def test_getitem_goes_with_its_producer() -> None:
    assert {name for name in phases_of_step() if "getitem" in name} == {"/getitem#0", "/getitem#1"}


def test_factories_are_duplicated_per_phase() -> None:
    assert {name for name in phases_of_step() if "ones" in name} == {"/ones#0", "/ones#0/bwd"}


def test_names_come_from_the_module_stack_and_are_unique() -> None:
    graph_module = trace(lambda x: x.sin().sin() + x, X)
    nodes = [n for n in graph_module.graph.nodes if n.op == "call_function"]
    for node in nodes[:2]:
        node.meta["nn_module_stack"] = {"a": ("", object), "b": ("model.layers.0@1", object)}
    run_passes(graph_module, [assign_phases, name_operators], NO_BACKWARD)
    assert [n.meta["operator"] for n in nodes] == ["layers.0/sin#0", "layers.0/sin#1", "layers.0/add#0"]


def test_constants_are_written_out() -> None:
    table = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    graph_module = trace(lambda x: x + table, X)
    graph_module, _ = run_passes(graph_module, [inline_constants], NO_BACKWARD)
    nodes = [n for n in graph_module.graph.nodes if n.op == "call_function"]
    assert nodes[0].target is constant
    torch.testing.assert_close(graph_module(X)[0], X + table)


def test_constants_of_one_value_or_none_are_filled_on_the_device() -> None:
    for table in (torch.full((3,), 2.0), torch.zeros(0)):
        graph_module = trace(lambda x, table=table: x[: len(table)] + table, torch.randn(3))
        graph_module, _ = run_passes(graph_module, [inline_constants], NO_BACKWARD)
        assert aten.full.default in {node.target for node in graph_module.graph.nodes}
        assert graph_module(torch.ones(3))[0].shape == table.shape


def test_large_constants_are_refused() -> None:
    table = torch.randn(4, 2000)
    graph_module = trace(lambda x: x + table, torch.randn(4, 2000))
    with pytest.raises(CaptureError, match="register it with register_buffer"):
        run_passes(graph_module, [inline_constants], NO_BACKWARD)


def test_tidying_twice_changes_nothing() -> None:
    graph_module = trace(lambda y: torch.cat(y.split(4, 2), 2).transpose(0, 1).reshape(-1), Y)
    graph_module, _ = run_passes(graph_module, TIDY_PASSES, NO_BACKWARD)
    once = graph_module.code
    graph_module, timings = run_passes(graph_module, TIDY_PASSES, NO_BACKWARD)
    assert graph_module.code == once
    assert [timing.name for timing in timings] == [p.__name__ for p in TIDY_PASSES]
