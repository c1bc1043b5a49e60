"""Who may import whom: read from the source by ast, compared with one tuple."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import autopar
from tests.plans.test_plan_text import small_plan

ROOT = Path(__file__).resolve().parent.parent


class Layer(NamedTuple):
    """Rooms that may import each other and the layers below; `what` stands in the table of docs/architecture.md."""

    what: str
    rooms: set[str]


LAYERS: tuple[Layer, ...] = (
    Layer(
        "user errors; every private torch symbol; atomic files; what is loaded later; old names; how long it took; "
        "when garbage is collected",
        {"_compat", "errors", "files", "later", "nearest_name", "renamed", "timing", "young_garbage"},
    ),
    Layer(
        "values: devices and links, placements and what moves between them, our operators, a graph with its roles",
        {"hardware", "layouts", "ops", "program"},
    ),
    Layer(
        "operators' rules; the Plan, its file and its words; schedules of pipelines; what a lowered graph says",
        {"graphs", "plans", "rules", "schedules"},
    ),
    Layer(
        "seconds and bytes; graph rewrites, the lowering among them: neither knows the other",
        {"cost_models", "passes"},
    ),
    Layer(
        "a module as one graph; what a user asks beside it",
        {"capture", "request"},
    ),
    Layer(
        "the optimisation",
        {"planner"},
    ),
    Layer(
        "processes, devices, `ParallelModule`; never imports `planner`",
        {"runtime"},
    ),
    Layer(
        "the step of a plan, played",
        {"simulation"},
    ),
    Layer(
        "what people call and read",
        {
            "api",
            "cli",
            "demo",
            "explain",
            "exporters",
            "importers",
            "integrations",
            "kept_plans",
            "questions",
            "report",
            "verification",
        },
    ),
)
"""From the bottom up. A module imports its own layer and the layers below it.

    python -m tests.test_import_order     writes the table of docs/architecture.md
"""

ARROW_UP = ("autopar.plans.parallel_plan", "autopar.explain.answers")
"""The one import of a higher layer, for type checkers only: a plan hands out what explain answers."""

ARROWS_LATER = {
    ("autopar.plans.parallel_plan", "autopar.explain.alone"),
    ("autopar.plans.parallel_plan", "autopar.report.html.page"),
}
"""Higher modules that a lower one loads when it is first asked: a plan without an origin answers by its file, and a
notebook draws a plan as the report does."""

FORBIDDEN = {("runtime", "planner"), ("passes", "cost_models"), ("cost_models", "passes")}
"""Imports that the layers would allow and the design does not: a plan runs where no planner is installed; a pass
rewrites whatever that costs, and what both read of a graph stands in `graphs`."""

HEAVY = (
    "torch",
    "ortools",
    "triton",
    "transformers",
    "sympy",
    "networkx",
    "numpy",
    "jinja2",
    "accelerate",
    "lightning",
    "peft",
)
"""What takes a tenth of a second and more to load, and is loaded only by what needs it."""

QUICK = {
    "import autopar": "import autopar",
    "autopar --help": "--help",
    "a mistyped command": "paln",
    "plan --help": "plan --help",
    "a mistyped axis": "plan hf:none.json --cluster 8-H100 --dims tpp=2",
    "show": "show {plan}",
    "diff": "diff {plan} {plan}",
    "export": "export {plan} --to megatron",
}
"""What loads none of `HEAVY`: the words behind `autopar`, or a statement."""


def source_files(package: str) -> list[tuple[str, Path]]:
    """(full module name, file) of every module of a package at the root, through the committed links."""
    found = []
    for folder, _, names in os.walk(ROOT / package, followlinks=True):
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder) / name
                parts = path.relative_to(ROOT).with_suffix("").parts
                found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports_of(path: Path) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """(module, imported names, only for type checkers) of every import, also those inside functions."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, (), id(node) in typing_only
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the full name of the module"
            yield node.module or "", tuple(alias.name for alias in node.names), id(node) in typing_only


MODULES = dict(source_files("autopar"))
ROOM_OF_LAYER = {room: level for level, layer in enumerate(LAYERS) for room in layer.rooms}


def imported_modules(path: Path, *, typing_too: bool = True) -> set[str]:
    """The modules of autopar that a file imports: `from autopar.a import b` is autopar.a.b where that is one."""
    found = set()
    for module, names, typing_only in imports_of(path):
        if module.split(".")[0] == "autopar" and (typing_too or not typing_only):
            inner = {f"{module}.{name}" for name in names} & set(MODULES)
            found |= inner
            if not inner or len(inner) < len(names):
                found.add(module)
    return found


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"autopar", "autopar.__main__"}))
def test_module_imports_only_its_own_layer_and_lower_ones(name: str) -> None:
    room = name.split(".")[1]
    assert room in ROOM_OF_LAYER, f"{name} stands in no layer; add {room!r} to LAYERS"
    for other in imported_modules(MODULES[name]) - {up for by, up in [ARROW_UP] if by == name}:
        assert other != "autopar", f"{name} imports the facade; import the module that defines it"
        other_room = other.split(".")[1]
        assert ROOM_OF_LAYER[other_room] <= ROOM_OF_LAYER[room], f"{name} imports {other}, which stands higher"
        assert (room, other_room) not in FORBIDDEN, f"{name} imports {other}"


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {name: imported_modules(path, typing_too=False) - {name} for name, path in MODULES.items()}
    for name in graph:  # `autopar.planner.solver.__init__` gathers its own modules: that is no circle
        graph[name] = {other for other in graph[name] if not (name.startswith(f"{other}.") and name in graph[other])}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("package", ["autopar", "benchmarks", "tests"])
def test_rooms_are_imported_by_their_full_name(package: str) -> None:
    rooms = {link.name for link in (ROOT / "autopar").iterdir() if link.is_symlink()}
    assert rooms == {"cost_models", "passes", "runtime"}
    for name, path in source_files(package):
        for module, _, _ in imports_of(path):
            assert module.split(".")[0] not in rooms, f"{name} imports {module}; write autopar.{module}"


@pytest.mark.parametrize("what", QUICK)
def test_what_needs_no_library_loads_none(what: str, tmp_path: Path) -> None:
    words = QUICK[what].format(plan=tmp_path / "plan.json")
    small_plan().save(tmp_path / "plan.json")
    run = words if words.startswith("import") else f"from autopar.cli import main; main({words.split()})"
    code = f"import sys, atexit; atexit.register(lambda: print([n for n in {HEAVY} if n in sys.modules])); {run}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def loaded_later(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every `later(...)` in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "later":
            module, name = (ast.literal_eval(argument) for argument in node.args)
            yield module, name


def test_what_is_loaded_later_is_there_and_not_higher() -> None:
    for module, path in MODULES.items():
        for other, name in loaded_later(path):
            assert (module, other) in ARROWS_LATER or not _is_higher(other, module), f"{module} loads {other}"
            assert name in _defined(MODULES[other]), f"{module}: {other} has no {name}"


def _is_higher(other: str, module: str) -> bool:
    return ROOM_OF_LAYER[other.split(".")[1]] > ROOM_OF_LAYER[module.split(".")[1]]


def _defined(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_the_facade_loads_what_type_checkers_see() -> None:
    typed = {name: module for module, names, typing in imports_of(MODULES["autopar"]) if typing for name in names}
    assert typed == autopar.LOADED_LATER
    assert set(autopar.__all__) <= set(dir(autopar))
    for name in autopar.__all__:
        assert getattr(autopar, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'parallelise'"):
        autopar.parallelise  # type: ignore[attr-defined]  # noqa: B018


def test_layers_name_every_room_once() -> None:
    assert len(ROOM_OF_LAYER) == sum(len(layer.rooms) for layer in LAYERS)


ARCHITECTURE = ROOT / "docs" / "architecture.md"
TABLE_HEAD = "| layer | modules | what lives there |\n|---|---|---|\n"


def layer_table() -> str:
    """The rows of the table: number, rooms, what lives there."""
    rows = (f"| {at} | {', '.join(f'`{room}`' for room in sorted(layer.rooms))} | {layer.what} |\n"
            for at, layer in enumerate(LAYERS, 1))  # fmt: skip
    return "".join(rows)


def with_table(text: str) -> str:
    """The page with the rows behind the table's head replaced."""
    before, after = text.split(TABLE_HEAD)
    rest = after[after.index("\n\n") + 1 :]
    return f"{before}{TABLE_HEAD}{layer_table()}{rest}"


def test_the_page_shows_these_layers() -> None:
    text = ARCHITECTURE.read_text()
    assert with_table(text) == text, "run python -m tests.test_import_order"


if __name__ == "__main__":
    ARCHITECTURE.write_text(with_table(ARCHITECTURE.read_text()))
