"""Inductor as an emit backend: the pieces of a graph between its collectives, compiled at their first call.

    [mm, all_reduce, wait]  node by node      [mul, sin]  one kernel of inductor's

`passes/kernels/compilable_pieces.py` cuts, and every piece takes one list of arguments and empties it. Pieces of equal
text are compiled once for each set of strides that reaches them; equal layers therefore cost what one of them costs. Of
the processes of a machine that reach a piece together, one compiles while the others wait and then find it on disk. A
value ends with the last piece that reads it (inside of a compiled piece nothing that it was given ends early).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from filelock import FileLock
from torch import fx

from autopar._compat import compilation_folder, compile_fx, profiler_is_on
from autopar.errors import ConfigurationError
from autopar.passes.kernels.compilable_pieces import CompilablePiece, cut_into_pieces
from autopar.runtime.kernels.named_calls import piece_name
from autopar.runtime.kernels.registry import has_triton

Call: TypeAlias = Callable[[list[Any]], Any]
Made: TypeAlias = dict[tuple[str, tuple[Any, ...]], Callable[..., Any]]
"""Compiled pieces by their text and by the forms of their arguments."""


@dataclass(frozen=True, slots=True)
class PieceByPiece:
    """A graph in pieces, each with what runs it. arguments: names of what the graph takes."""

    arguments: tuple[str, ...]
    pieces: Sequence[tuple[CompilablePiece, Call]]

    def __call__(self, arguments: list[Any]) -> Any:
        """Run the pieces; `arguments` is emptied."""
        values = dict(zip(self.arguments, arguments, strict=True))
        arguments.clear()
        results: Any = ()
        with torch.no_grad():
            for piece, run in self.pieces:
                results = run([values.pop(name) if name in piece.ends else values[name] for name in piece.inputs])
                values.update(zip(piece.outputs, results, strict=False))  # the last piece names none
        return results


def piece_by_piece(graph_module: fx.GraphModule, eager: Callable[[fx.GraphModule], Call]) -> PieceByPiece:
    """The graph as pieces; `eager` makes the call of those that nothing is gained by compiling."""
    made: Made = {}
    names = tuple(node.name for node in graph_module.graph.find_nodes(op="placeholder"))

    def call_of(piece: CompilablePiece) -> Call:
        return CompiledPiece(piece.graph_module, piece.text, made) if piece.compiled else eager(piece.graph_module)

    return PieceByPiece(names, [(piece, call_of(piece)) for piece in cut_into_pieces(graph_module)])


@dataclass(frozen=True, slots=True)
class CompiledPiece:
    """One piece, compiled for the forms of arguments that it meets. made: shared by the pieces of a graph."""

    graph_module: fx.GraphModule
    text: str
    made: Made
    by_strides: dict[tuple[Any, ...], Callable[..., Any]] = field(default_factory=dict)

    def __call__(self, arguments: list[Any]) -> Any:
        """Run, and compile where no equal piece was; `arguments` is emptied. Sizes and dtypes of a piece are those of
        the plan, so that strides alone tell its arguments from each other."""
        strides = tuple(argument.stride() for argument in arguments)
        run = self.by_strides.get(strides)
        if run is None:
            run = self.by_strides[strides] = self._compiled(arguments)
        given = tuple(arguments)
        arguments.clear()
        if not profiler_is_on():
            return run(*given)
        with torch.profiler.record_function(piece_name(self.graph_module)):
            return run(*given)

    def _compiled(self, arguments: Sequence[torch.Tensor]) -> Callable[..., Any]:
        key = (self.text, tuple((one.shape, one.stride(), one.dtype, one.device) for one in arguments))
        if key not in self.made:
            check_compiler(arguments[0].device.type)
            with _only_process_that_compiles(repr(key)):
                self.made[key] = compile_fx(self.graph_module, list(arguments))
        return self.made[key]


def _only_process_that_compiles(piece: str) -> FileLock:
    """A lock of the processes of this machine: ranks reach equal pieces together. It ends with its holder."""
    name = hashlib.sha256(piece.encode()).hexdigest()
    return FileLock(compilation_folder() / f"autopar-{name[:32]}.lock")


def cpp_compiler() -> str | None:
    """The C++ compiler that inductor calls: $CXX, else g++; None where it is not there."""
    return shutil.which(os.environ.get("CXX") or "g++")


def check_compiler(device_type: str) -> None:
    """Raises ConfigurationError where inductor cannot compile for a type of device."""
    if device_type == "cpu" and cpp_compiler() is None:
        raise ConfigurationError(
            f"kernel_backend='inductor' compiles C++ and {os.environ.get('CXX') or 'g++'} is not found: install g++, "
            "name a compiler in CXX, or take plan.with_(kernel_backend='eager')"
        )
    if device_type == "cuda" and not has_triton():
        raise ConfigurationError(
            "kernel_backend='inductor' compiles Triton on CUDA and triton is not installed: "
            "pip install 'autopar[kernels]', or take plan.with_(kernel_backend='eager')"
        )
