"""No test ends early without a word: it does not return, and what may skip it stands here with the reason.

    if not is_legal(case): return   -->   only legal cases are made, `assume(is_legal(case))`, or a skip with a reason

pytest counts and names the skipped tests of a run at its end (`-rsfE` in pyproject.toml).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent

MAY_SKIP = {
    "benchmarks/test_mutants.py": "coverage is an extra",
    "benchmarks/netlab/test_lab.py": "shaped links need root and Linux",
    "benchmarks/netlab/test_stalled_link.py": "shaped links need root and Linux",
    "benchmarks/validation/test_pipelines.py": "published measurements are not part of the repository",
    "benchmarks/validation/test_rows.py": "published measurements are not part of the repository",
    "benchmarks/validation/test_schemas.py": "published measurements are not part of the repository",
    "cost_models/test_job_profile.py": "a profile of a machine without a GPU",
    "distributed/test_frameworks.py": "the frameworks are extras",
    "distributed/test_inductor.py": "needs a C++ compiler",
    "distributed/test_scripts.py": "the frameworks are extras",
    "exporters/test_uniform.py": "Python 3.10 reads no TOML",
    "golden/test_golden.py": "the files are of one minor version of torch",
    "gpu/test_dropout_kernel.py": "needs a GPU",
    "gpu/test_kernels_on_cuda.py": "needs a GPU",
    "gpu/test_stream_copies_on_cuda.py": "needs a GPU",
    "hardware/test_cluster.py": "what is detected without a GPU",
    "integrations/test_step_trackers.py": "tensorboard and wandb are extras",
    "planner/pipelines/test_block_costs.py": "bytes by hand are those of one device",
    "planner/solver/test_local_search.py": "some random problems are repaired by nothing",
    "report/chromium.py": "pages are opened where Chromium is installed",
    "rules/test_triton_operators.py": "Triton is an extra",
    "runtime/calibration/test_profile_kernels.py": "one test with a GPU, one without",
    "runtime/checkpoints/test_extra_state.py": "torchdata is an extra",
    "runtime/kernels/test_inductor.py": "needs a C++ compiler",
    "runtime/kernels/test_registry.py": "Triton is an extra",
    "runtime/host_memory/test_host_allocator.py": "settings of glibc",
    "runtime/test_launchers.py": "Open MPI and Slurm are packages of the system",
    "schedules/test_families.py": "torch may move its schedules",
    "schedules/test_list_scheduler.py": "torch may move its schedules",
    "test_compat.py": "needs g++",
}
"""File -> why tests in it may be skipped on some machine or for some of their cases."""

SKIP = re.compile(r"pytest\.(mark\.)?(skip|skipif|importorskip|xfail)\b")


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function's body, without those of functions inside."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case) and not isinstance(child, ast.FunctionDef):
            yield child
            yield from own_nodes(child)


def early_ends(text: str) -> list[str]:
    """Tests that return."""
    found = []
    for function in ast.walk(ast.parse(text)) if "return" in text else ():
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            found += [function.name for node in own_nodes(function) if isinstance(node, ast.Return)]
    return found


@cache
def texts() -> dict[str, str]:
    """All files of tests but this one, by their path."""
    paths = [path for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__).resolve()]
    return {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_no_test_returns() -> None:
    files = {path: text for path, text in texts().items() if Path(path).name.startswith("test_")}
    assert {path: names for path, text in files.items() if (names := early_ends(text))} == {}


def test_what_may_be_skipped_is_listed_with_its_reason() -> None:
    assert {path for path, text in texts().items() if SKIP.search(text)} == set(MAY_SKIP)


def test_an_early_end_is_seen() -> None:
    assert early_ends("def test_a(x):\n    if x:\n        return\n    assert x\n") == ["test_a"]
    assert early_ends("def test_a(x):\n    def f():\n        return 1\n    assert f()\n") == []
    assert early_ends("def helper(x):\n    return x\n\ndef test_a(x):\n    assert x\n") == []
