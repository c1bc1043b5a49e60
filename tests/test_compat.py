"""Every private symbol of torch that autopar relies on exists and does what its users assume."""

import contextlib
import importlib
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar import _compat
from autopar.layouts.ordered_shards import factor_of
from autopar.ops.experts import expert_order


@pytest.mark.parametrize("name", _compat.__all__)
def test_symbol_exists(name: str) -> None:
    assert getattr(_compat, name) is not None


def test_a_connection_to_the_store_has_keys_of_its_own() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mine, same = _compat.store_connection("a"), _compat.store_connection("a")
        mine.set("key", "value")
        assert same.get("key") == b"value"
        assert not _compat.store_connection("b").check(["key"])
        assert _compat.all_groups() == []
    finally:
        dist.destroy_process_group()


def test_who_shares_a_storage_is_counted() -> None:
    tensor = torch.zeros(2, 2)
    alone = _compat.storage_references(tensor)
    view = tensor[0].detach()
    same = tensor
    assert _compat.storage_references(tensor) == _compat.storage_references(view) == alone + 1
    del view, same
    assert _compat.storage_references(tensor) == alone


def test_what_an_autograd_node_saves_shares_its_storage_until_backward() -> None:
    x, saved = torch.ones(2, requires_grad=True), torch.ones(2)
    alone = _compat.storage_references(saved)
    y = (x * saved.detach()).sum()
    assert _compat.storage_references(saved) == alone + 1
    y.backward()
    assert _compat.storage_references(saved) == alone


def test_versions_are_parsed() -> None:
    assert _compat.torch_version("2.11.0+cu128") == (2, 11)
    assert _compat.torch_version("2.14.0a0+git123") == (2, 14)


def test_newer_torch_warns() -> None:
    with pytest.warns(UserWarning, match=r"tested with torch up to 2\.14, this is 9\.9"):
        _compat.warn_about_untested_torch("9.9.0")


def test_tested_torch_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _compat.warn_about_untested_torch("2.11.0")


def test_joint_export_has_descriptors() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    with contextlib.ExitStack() as stack:
        joint = _compat.aot_export_joint_with_descriptors(stack, nn.Linear(2, 2), (x,), decompositions={})
    graph = joint.graph_module.graph
    inputs = [type(node.meta["desc"]) for node in graph.nodes if node.op == "placeholder"]
    outputs = [type(desc) for desc in graph.output_node().meta["desc"]]
    assert inputs == [_compat.ParamAOTInput] * 2 + [_compat.PlainAOTInput, _compat.TangentAOTInput]
    assert outputs == [_compat.PlainAOTOutput] + [_compat.GradAOTOutput] * 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_compile_fx_takes_a_graph_and_tensors() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.sin.default, (x,)),))
    value = torch.randn(4, 3).t()
    (found,) = _compat.compile_fx(torch.fx.GraphModule({}, graph), [value])(value)
    torch.testing.assert_close(found, value.sin())
    assert found.stride() == value.stride()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_what_inductor_compiled_is_found_again_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, which the reset stands for; a graph of another operator is compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters = importlib.import_module("torch._dynamo.utils").counters
    for operator, hits in ((torch.ops.aten.cos, 0), (torch.ops.aten.cos, 1), (torch.ops.aten.tan, 0)):
        torch._dynamo.reset()
        counters.clear()
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        graph.output((graph.call_function(operator.default, (x,)),))
        value = torch.randn(4, 3)
        (found,) = _compat.compile_fx(torch.fx.GraphModule({}, graph), [value])(value)
        torch.testing.assert_close(found, operator(value))
        assert counters["inductor"]["fxgraph_cache_hit"] == hits
        assert counters["inductor"]["fxgraph_cache_bypass"] == 0


def test_strided_shard_prints_its_split() -> None:
    assert _compat.StridedShard(1, split_factor=3).split_factor == 3


def test_saved_tensors_are_released() -> None:
    freed: list[bool] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            saved = x + 1
            weakref.finalize(saved.untyped_storage(), freed.append, True)
            ctx.save_for_backward(saved)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            assert len(ctx.saved_tensors) == 1
            _compat.release_saved_tensors(ctx)
            states.append(bool(freed))
            return gradient * 2

    states: list[bool] = []
    result = Double.apply(torch.ones(2, requires_grad=True)).sum()  # type: ignore[no-untyped-call]
    result.backward(retain_graph=True)
    result.backward()
    assert states == [False, True]


def test_shared_gradient_hooks_run_and_are_removed_by_their_handles() -> None:
    def add_one(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.add_(1.0)

    old, new = (torch.ones(2, requires_grad=True) for _ in range(2))
    handles = [old.register_hook(lambda gradient: gradient * 3)]
    handles.append(old.register_post_accumulate_grad_hook(add_one))
    assert _compat.share_gradient_hooks(old, new) == 2
    del old
    new.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [4.0, 4.0]
    for handle in handles:
        handle.remove()
    new.grad = None
    new.sum().backward()
    assert new.grad.tolist() == [1.0, 1.0]


def test_dynamo_stays_out_of_a_forward() -> None:
    class Opaque(nn.Module):
        def forward(self, x: torch.Tensor) -> bool:
            return torch.compiler.is_compiling()

    _compat.keep_dynamo_out(Opaque)
    assert torch.compile(Opaque())(torch.ones(1)) is False


def test_a_subclass_is_not_asked_without_torch_function() -> None:
    asked = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            asked.append(func)
            return NotImplemented

    tensor = torch.ones(2).as_subclass(Asked)
    with _compat.without_torch_function():
        assert float(torch.add(tensor, 1).sum()) == 4.0
    assert not asked


def test_the_function_behind_an_operator_of_ours_is_found() -> None:
    assert _compat.custom_implementation(torch.ops.autopar.expert_order.default) is expert_order._init_fn
    assert _compat.custom_implementation(torch.ops.aten.mm.default) is None


def test_a_strided_shard_cuts_what_lies_in_an_order() -> None:
    whole, split = torch.arange(4), _compat.StridedShard(0, split_factor=factor_of((2, 0, 3, 1)))._split_tensor
    assert [block.tolist() for block in split(whole, 2)[0]] == [[2, 0], [3, 1]]
    with pytest.raises(RuntimeError, match="an order that this process does not know"):
        _compat.StridedShard(0, split_factor=1 << 40)._split_tensor(whole, 2)
    plain = _compat.StridedShard(0, split_factor=2)._split_tensor
    assert [block.tolist() for block in plain(whole, 2)[0]] == [[0, 2], [1, 3]]


def _written(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Calls of every form, one of them erased, and a copy of the rest."""
    x = graph.placeholder("x")
    x.meta["kept"] = {"in": "copies"}
    first = graph.call_function(torch.add, (x, x), {"alpha": 2})
    graph.erase_node(graph.call_function(torch.add, (first, 1)))
    parts = graph.call_function(torch.cat, ([first, x, (1, slice(x, None))],), {"dim": 0})
    graph.output((parts, graph.call_function(torch.add, (first, parts))))
    result = type(graph)()
    result.output(result.graph_copy(graph, {}))
    return result


def test_our_graph_writes_what_that_of_torch_writes() -> None:
    ours, plain = _written(_compat.Graph()), _written(torch.fx.Graph())
    for graph in (ours, plain):
        graph.lint()
        graph.create_node("call_function", torch.add, (1, 2))
    said = [[(str(n.__getstate__()["_input_nodes"]), str(n.users), n.format_node(), n.meta) for n in g.nodes]
            for g in (ours, plain)]  # fmt: skip
    assert said[0] == said[1]
    assert [type(n.args) for n in ours.nodes] == [type(n.args) for n in plain.nodes]
    assert ours.find_nodes(op="call_function", target=torch.add) == [n for n in ours.nodes if n.target is torch.add]


def test_a_copied_node_has_meta_of_its_own() -> None:
    graph = _compat.Graph()
    x = graph.placeholder("x")
    copy = graph.node_copy(x)
    copy.meta["phase"] = "backward"
    assert "phase" not in x.meta
