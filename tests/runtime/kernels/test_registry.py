"""Triton kernels compute what their references compute, and compile for the devices of the presets without spilling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import ConfigurationError
from autopar.ops.dropout_operator import dropout_by_index, dropout_rows_reference
from autopar.ops.norms import LARGEST_ROW
from autopar.ops.random_index import Runs, as_rows
from autopar.runtime.kernels import kernels, registry
from autopar.runtime.kernels.registry import KERNELS, choose
from benchmarks.kernels import Compilation, compilations, compiled

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


@pytest.fixture(scope="module")
def interpreted() -> dict[str, int | str]:
    """Triton reads the variable when a kernel is defined, so the interpreter gets a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.runtime.interpreted"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, int | str] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


@pytest.mark.exhaustive(sample="interpreted_kernels")
@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("module", "count"), [("interpreted_dropout", 48), ("interpreted_kernels", 316)])
def test_numerics_in_the_interpreter(module: str, count: int, interpreted: dict[str, int | str]) -> None:
    assert interpreted[module] == count


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("interpreted_dropout", "1"),
        ("interpreted_kernels", "rms_norm_backward"),
        ("interpreted_kernels", "linear_cross_entropy"),
        ("interpreted_kernels", "rope"),
        ("interpreted_kernels", "merge_blocks"),
        ("interpreted_kernels", "grouped_outer"),
        ("interpreted_kernels", "pack"),
        ("interpreted_kernels", "quantised_rows"),
        ("interpreted_kernels", "round_groups"),
        ("interpreted_kernels", "indexed_attention"),
    ],
)
def test_a_fault_is_noticed(module: str, fault: str, interpreted: dict[str, int | str]) -> None:
    assert str(interpreted[f"{module} {fault}"]).startswith("AssertionError")


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_dropout_compiles_ahead_of_time(capability: int, dtype: str) -> None:
    types = {"mask": "*i8", "seed": "*i64", "scale": "fp32"}
    types |= dict.fromkeys(("salt", "threshold", "first", "row_stride", "columns", "tiles"), "i64")
    case = Compilation(
        name="dropout",
        module="dropout",
        kernel="dropout_kernel",
        constants={"BLOCK": 1024, "ALIGNED": False},
        types=types,
    )
    assert compiled(case, dtype, capability).stack_bytes == 0


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["layer norm of 1024 backward", "silu gated_backward",
                                  "cross-entropy rows", "cross-entropy backward", "pack", "unpack",
                                  "rope backward", "merging", "grouped product", "grouped outer",
                                  "attention of 64 rows"])  # fmt: skip
def test_nothing_is_spilled(name: str, capability: int) -> None:
    case = next(one for one in compilations() if one.name == name)
    found = compiled(case, case.dtypes[-1], capability)
    assert found.stack_bytes == 0
    assert 0 < found.registers * 32 * found.num_warps <= 65536


@needs_triton
def test_a_row_that_is_too_long_is_spilled() -> None:
    case = next(one for one in compilations() if one.name == f"layer norm of {LARGEST_ROW} backward")
    longer = replace(case, constants={**case.constants, "BLOCK": 2 * LARGEST_ROW})
    assert compiled(longer, "bf16", 90).stack_bytes > 0


def test_a_cpu_takes_the_reference() -> None:
    kernel = KERNELS.kernels["rms_norm"]
    choice = choose(kernel, torch.randn(2, 4), torch.randn(4), 1e-6)
    assert choice.run is kernel.reference
    assert choice.reason == "tensors are on cpu"


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("rms_norm", (torch.empty(1, 9000), torch.empty(9000), 1e-6), "9000 elements"),
        ("rms_norm", (torch.empty(1, 8).double(), torch.empty(8).double(), 1e-6), "float64"),
        ("gated", (torch.empty(8), torch.empty(8), "relu"), "relu"),
        ("linear_cross_entropy", (torch.empty(2, 8), torch.empty(0, 8), torch.empty(2), 0), "vocabulary is empty"),
        ("pack", (torch.empty(4, 4, dtype=torch.bool), 1, 1, 2, 4), "bool"),
        ("rms_norm", (torch.empty(1, 8), torch.empty(8), 1e-6), None),
        ("dropout_rows", (torch.empty(4, 4).bfloat16(), 0.5, torch.tensor(1), 0, 0, 4, 4), None),
    ],
)
def test_kernels_say_what_they_do_not_take(name: str, arguments: tuple[Any, ...], reason: str | None) -> None:
    found = KERNELS.kernels[name].refusal(*arguments)
    assert found is None if reason is None else reason in str(found)


def test_every_kernel_has_its_operator_and_its_module() -> None:
    for name, kernel in KERNELS.kernels.items():
        assert getattr(torch.ops.autopar, name)
        path = Path(registry.__file__).parent / f"triton_{kernel.module}.py"
        assert f"def {name}(" in path.read_text()


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="eager or inductor"):
        kernels(torch.fx.GraphModule({}, torch.fx.Graph()), "magic")
