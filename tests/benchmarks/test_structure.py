"""The measures of a made-up tree, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.structure.__main__ import table
from benchmarks.structure.import_graph import declared_layers
from benchmarks.structure.measures import structure

FILES = {
    "house/__init__.py": '"""The facade."""\nfrom house.planner.search import Search\n',
    "house/base.py": '"""Values."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n'
    "    from house.planner.search import Search\n",
    "house/rules/__init__.py": '"""Rules."""\n',
    "house/rules/table.py": '"""Strings."""\ndef _one(call: str) -> str:\n    return call\n'
    '_NEG = "... -> ..."\n'
    'MORE = {"aten.mm": "m k, k n -> m n", "aten.neg": _NEG}\nRULES = {**MORE, "aten.one": _one}\n',
    "house/planner/__init__.py": '"""Choices."""\n',
    "house/planner/search.py": '"""Search."""\nfrom house.planner.solver.bound import bound\n'
    "from house.planner.limits import A\nA, B = 1, -2 ** 20\nTHIRD: float = 1e-3\nNAME = 'x'\nlower = 3\n"
    'class Search:\n    """One."""\n    def run(self, pipeline=None):\n        if pipeline is None and A:\n'
    "            import house.base\n        return pipeline is not None\n"
    "    def _hidden(self) -> None:\n        pass\n",
    "house/planner/limits.py": '"""Limits."""\nimport house.rules.table\n',
    "house/planner/solver/__init__.py": '"""Solver."""\nfrom house.planner.solver.bound import bound\n',
    "house/planner/solver/bound.py": 'def bound(x: int) -> int:\n    return x\n\n\nclass Search:\n    """Another."""\n',
    "house/planner/solver/table.py": '"""A table."""\nfrom house.planner.search import Search\n',
    "tests/planner/test_search.py": "",
    "tests/test_journey.py": "",
    "tests/layers.py": 'LAYERS: tuple = (frozenset({"base", "rules"}), Layer("choices", {"planner"}))\n',
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The measures of the made-up tree."""
    root = tmp_path_factory.mktemp("tree")
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return structure(root, declared_layers(root / "tests/layers.py"), "house")


def test_entries_and_levels(measured: dict[str, Any]) -> None:
    rooms = measured["rooms"]
    assert rooms["packages"]["house.planner"] == {"entries": 3, "levels": 3}  # solver and search in a circle, limits
    assert rooms["packages"]["house"] == {"entries": 3, "levels": 2}  # planner, and one of rules and base
    assert rooms["circles_between_children"] == ["house.planner.search <-> house.planner.solver"]
    assert rooms["pairs_that_import_each_other"] == []
    assert rooms["arrows_up"] == ["house.base -> house.planner.search"]


def test_hidden_imports_and_those_for_type_checkers(measured: dict[str, Any]) -> None:
    assert measured["imports"] == {"hidden": ["house/planner/search.py:12"], "for_type_checkers": 1}


def test_types_and_docstrings(measured: dict[str, Any]) -> None:
    assert measured["signatures_without_types"] == ["house/planner/search.py:10 run"]
    assert measured["public_names_without_docstring"] == [
        "house/planner/search.py:10 Search.run",
        "house/planner/solver/bound.py:1 house.planner.solver.bound",
        "house/planner/solver/bound.py:1 bound",
    ]


def test_sizes(measured: dict[str, Any]) -> None:
    sizes = measured["sizes"]
    assert sizes["modules"] == 10
    assert sizes["functions"] == 4
    assert sizes["lines_per_function"]["median"] == 2
    assert sizes["largest_class"] == {"lines": 8, "name": "house/planner/search.py:8 Search"}


def test_words_and_numbers(measured: dict[str, Any]) -> None:
    assert measured["rules"] == {
        "strings": 2, "functions": 1, "share_of_strings": 0.667, "with_functions": ["aten.one"],
    }  # fmt: skip
    assert measured["names"] == {"modules": {"table": 2}, "classes": {"Search": 2}}
    assert measured["pipeline_is_none"]["times"] == 2
    assert measured["planner_constants"]["numbers"] == 3


def test_mirrored_tests(measured: dict[str, Any]) -> None:
    tests = measured["tests"]
    assert (tests["files"], tests["mirror_a_path"], tests["modules"], tests["modules_with_a_test"]) == (2, 1, 6, 1)
    assert tests["without_a_module"] == ["journey.py"]


def test_two_trees_stand_beside_each_other() -> None:
    before = {"a": {"lines": 3, "name": "x/y.py"}, "b": [1, 2]}
    assert table([before, {"b": [1]}]).split() == ["b", "2", "1", "a", "3", "(y.py)", "-"]
