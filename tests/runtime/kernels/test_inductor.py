"""Graphs whose pieces inductor compiles compute what they compute node by node, and compile equal pieces once."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout

import autopar
from autopar.errors import ConfigurationError
from autopar.passes.kernels.compilable_pieces import cut_into_pieces
from autopar.runtime.kernels import inductor, kernels
from autopar.runtime.kernels.inductor import CompiledPiece, PieceByPiece, check_compiler, cpp_compiler
from benchmarks.agreement import compare, reference
from benchmarks.emit_backends import MODELS, compilations
from tests.distributed.inductor_jobs import SMALL
from tests.passes.kernels.test_compilable_pieces import aten, layers

needs_compiler = pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler is installed")


@pytest.mark.exhaustive(sample="llama")
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])  # compiling experts takes longer than both
def test_one_process_computes_what_the_plain_model_computes(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name](SMALL)
    plan = autopar.compile(copy.deepcopy(model), inputs).plan.with_(kernel_backend="inductor")
    module = autopar.compile(copy.deepcopy(model), inputs, plan=plan)
    found = compare(module, inputs, reference(model, inputs))
    assert found.agrees, found
    assert found.gradient_error < 1e-5
    pieces, compiled = compilations(module, inputs)
    assert compiled < pieces  # the model has three equal layers


@needs_compiler
@pytest.mark.slow
def test_other_strides_are_compiled_anew_and_arguments_are_taken() -> None:
    call = kernels(_pointwise(), "inductor")
    assert isinstance(call, PieceByPiece)
    (piece,) = (run for _, run in call.pieces if isinstance(run, CompiledPiece))
    for times, value in enumerate((torch.randn(6, 6), torch.randn(6, 6).t()), start=1):
        arguments = [value]
        (found,) = call(arguments)
        assert not arguments
        assert len(piece.made) == times
        torch.testing.assert_close(found, value.sin() * value)


@needs_compiler
def test_while_a_process_compiles_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_alone(graph_module: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        (lock,) = tmp_path.glob("*.lock")
        with pytest.raises(Timeout):
            FileLock(lock, is_singleton=False).acquire(timeout=0)
        return graph_module

    monkeypatch.setattr(inductor, "compilation_folder", lambda: tmp_path)
    monkeypatch.setattr(inductor, "compile_fx", compile_alone)
    call = kernels(_pointwise(), "inductor")
    for _ in range(2):  # the lock is free again behind a compilation, and no compilation is made twice
        call([torch.randn(4, 4)])


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigurationError, match="no-such-compiler is not found: install"):
        check_compiler("cpu")
    call = kernels(_pointwise(), "inductor")
    with pytest.raises(ConfigurationError, match="kernel_backend='eager'"):
        call([torch.randn(4, 4)])


def _pointwise() -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.mul.Tensor, (graph.call_function(aten.sin.default, (x,)), x)),))
    return torch.fx.GraphModule({}, graph)


def test_pieces_alone_compute_what_the_graph_computes() -> None:
    """The runner without a compiler: what crosses, what ends, views on both sides of a cut."""
    module = layers(3)
    for node in list(module.graph.nodes):
        if "c10d" in str(node.target):
            node.target, node.args = aten.neg.default, node.args[:1]
    module.recompile()
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    call = PieceByPiece(("x", "w"), [(p, lambda given, p=p: p.graph_module(*given)) for p in cut_into_pieces(module)])
    torch.testing.assert_close(call([x, w]), module(x, w))
