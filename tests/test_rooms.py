"""Every line of code knows its room: names of modules, entries and levels of packages, and where tests lie."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

import autopar
from benchmarks.structure.import_graph import Import, circles, imports_of, longest_chain, room_graph
from benchmarks.structure.source_tree import SourceModule, read_modules

ROOT = Path(__file__).resolve().parent.parent

MOST = {"autopar.planner": (10, 8), "autopar.passes": (14, 6), "autopar.runtime": (18, 7)}
"""Package -> how many entries it may have, on how many levels of imports between them."""

TOPIC_FOLDERS = ("distributed", "golden", "gpu")
"""Tests of the whole: on processes of their own, as texts, on a GPU."""

TOPICS = (
    "planner/test_context_parallelism.py",
    "runtime/kernels/test_every_kernel.py",
    "runtime/pipeline/test_delayed_ranks.py",
    "benchmarks/fake_cuda/test_stages.py",
    "benchmarks/gpu/test_cuda_branches.py",
    "benchmarks/netlab/test_stalled_link.py",
    "benchmarks/test_plan_quality_paper.py",
    "benchmarks/validation/test_expert_exchanges.py",
    "benchmarks/validation/test_published_collectives.py",
    "benchmarks/validation/test_published_memory.py",
    "benchmarks/validation/test_published_operators.py",
    "benchmarks/validation/test_validation_cli.py",
    "capture/test_intake.py",
    "capture/test_models_equal_eager.py",
    "cli/test_bad_input.py",
    "cli/test_examples.py",
    "cli/test_interrupt.py",
    "cli/test_machine_commands.py",
    "cost_models/test_operator_curves.py",
    "explain/test_explain.py",
    "explain/test_stages.py",
    "integrations/test_step_trackers.py",
    "passes/kernels/test_capped_experts.py",
    "passes/kernels/test_dispatched_rows.py",
    "passes/test_three_axes.py",
    "planner/pipelines/test_peaks.py",
    "planner/solver/test_random_restarts.py",
    "planner/test_four_axes.py",
    "planner/test_one_price.py",
    "planner/test_operator_alternatives.py",
    "planner/test_rediscovery.py",
    "plans/test_mutated_files.py",
    "rules/test_custom_operators.py",
    "rules/test_flops.py",
    "rules/test_halo_mutations.py",
    "rules/test_norm_mutations.py",
    "rules/test_prefix_sum_mutations.py",
    "rules/test_rules_by_execution.py",
    "rules/test_statistics_mutations.py",
    "rules/test_triton_operators.py",
    "runtime/test_peak_memory.py",
    "schedules/test_families.py",
    "test_bad_input.py",
    "test_docs.py",
    "test_import_order.py",
    "test_intake_trains.py",
    "test_platforms.py",
    "test_quickstart.py",
    "test_rooms.py",
    "test_silent_tests.py",
    "test_simulated_ranks.py",
)
"""Tests that are about no single module: what several of them do together, or what a user meets."""


@cache
def sources(package: str = "autopar") -> dict[str, SourceModule]:
    return read_modules(ROOT, package)


@cache
def all_imports() -> list[Import]:
    modules = sources()
    return [each for module in modules.values() for each in imports_of(module, modules)]


@cache
def entries_of(package: str) -> nx.DiGraph:
    return room_graph(package, all_imports(), sources())


def test_every_name_of_a_module_occurs_once() -> None:
    places: dict[str, list[str]] = {}
    for module in sources().values():
        if not module.is_package and not module.path.endswith("__main__.py"):
            places.setdefault(Path(module.path).stem, []).append(module.path)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_no_module_hides_behind_a_public_function() -> None:
    """`autopar.verify` is a function: a module of that name would take its place where it is imported."""
    for module in sources().values():
        if module.is_package:
            handed_out = set(autopar.__all__) if module.name == "autopar" else _handed_out(module)
            hidden = {name for name in handed_out if f"{module.name}.{name}" in sources()}
            assert not {name for name in hidden if not _is_import_of_module(module, name)}, module.path


def _handed_out(module: SourceModule) -> set[str]:
    imports = (node for node in module.tree.body if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name for node in imports for alias in node.names}


def _is_import_of_module(module: SourceModule, name: str) -> bool:
    imports = (node for node in module.tree.body if isinstance(node, ast.ImportFrom) and node.module == module.name)
    return any(alias.name == name for node in imports for alias in node.names)


@pytest.mark.parametrize("package", sorted(MOST))
def test_packages_have_few_entries_on_few_levels(package: str) -> None:
    entries, levels = MOST[package]
    graph = entries_of(package)
    assert len(graph) <= entries, sorted(graph)
    assert len(longest_chain(graph)) <= levels, longest_chain(graph)


@pytest.mark.parametrize("package", sorted(name for name, module in sources().items() if module.is_package))
def test_entries_of_a_package_import_each_other_in_no_circle(package: str) -> None:
    assert not circles(entries_of(package))


def test_every_package_says_what_it_is() -> None:
    assert [
        module.path for module in sources().values() if module.is_package and not ast.get_docstring(module.tree)
    ] == []


def test_tests_lie_where_their_modules_do() -> None:
    """tests/planner/solver/test_ties.py is about autopar/planner/solver/ties.py, tests/report/test_html.py about the
    package autopar/report/html, tests/benchmarks/test_report.py about benchmarks/report.py."""
    about = {Path(name.replace(".", "/")).relative_to("autopar") for name in sources() if name != "autopar"}
    about |= {Path(name.replace(".", "/")) for name in sources("benchmarks")}
    about |= {path.with_name(path.name.removeprefix("_")) for path in about}
    lost = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        inside = path.relative_to(ROOT / "tests")
        subject = inside.with_name(path.stem.removeprefix("test_"))
        if inside.parts[0] not in TOPIC_FOLDERS and subject not in about and inside.as_posix() not in TOPICS:
            lost.append(inside.as_posix())
    assert not lost, "move them to the path of their module, or name them in TOPICS"


def test_topics_are_tests() -> None:
    assert [topic for topic in TOPICS if not (ROOT / "tests" / topic).is_file()] == []
