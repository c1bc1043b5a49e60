"""The Triton dropout computes what the reference computes, and compiles for the devices of the presets."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from autopar.errors import ConfigurationError
from autopar.ops.dropout import dropout_by_index, dropout_rows_reference
from autopar.ops.random_index import Runs, as_rows
from autopar.runtime.kernels import kernels

SEED = torch.tensor(91)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

ROWS: list[tuple[Runs, bool]] = [
    ((((0, 6),), ((0, 8),), ((0, 5),)), True),
    ((((2, 3),), ((0, 8),), ((0, 5),)), True),
    ((((0, 6),), ((0, 8),), ((1, 3),)), True),
    ((((1, 2),), ((3, 4),), ((0, 5),)), True),
    ((((1, 2),), ((3, 4),), ((1, 3),)), False),
    ((((0, 2), (4, 1)), ((0, 8),), ((0, 5),)), False),
]


@pytest.mark.parametrize(("runs", "in_rows"), ROWS)
def test_blocks_in_rows_are_found_and_equal_the_general_form(runs: Runs, in_rows: bool) -> None:
    shape = (6, 8, 5)
    rows = as_rows(shape, runs)
    assert (rows is not None) == in_rows
    if rows is not None:
        x = torch.randn([sum(length for _, length in dim) for dim in runs])
        expected = dropout_by_index(x, 0.4, SEED, 3, runs, shape)
        for found, wanted in zip(dropout_rows_reference(x, 0.4, SEED, 3, *rows), expected, strict=True):
            assert torch.equal(found, wanted)


def interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Triton reads the variable when a kernel is defined, so the interpreter gets a process of its own."""
    command = [sys.executable, "-m", "tests.runtime.interpreted_dropout", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@needs_triton
@pytest.mark.slow
def test_numerics_in_the_interpreter() -> None:
    done = interpreted()
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) == 48


@needs_triton
@pytest.mark.slow
def test_a_shifted_index_is_noticed() -> None:
    done = interpreted("1")
    assert done.returncode != 0
    assert "AssertionError" in done.stderr


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_compiles_ahead_of_time(capability: int, dtype: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from autopar.runtime.kernels.dropout import dropout_kernel

    signature = {"x": f"*{dtype}", "out": f"*{dtype}", "mask": "*i8", "seed": "*i64", "salt": "i64"}
    signature |= {"threshold": "i64", "scale": "fp32", "first": "i64", "row_stride": "i64"}
    signature |= {"columns": "i64", "tiles": "i64", "BLOCK": "constexpr"}
    source = ASTSource(dropout_kernel, signature, {"BLOCK": 1024})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f"sm_{capability}" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 0


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="eager or inductor"):
        kernels(torch.fx.GraphModule({}, torch.fx.Graph()), "magic")
