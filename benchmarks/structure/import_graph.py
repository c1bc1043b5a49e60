"""Who imports whom: chains, circles and arrows against the layers.

    planner/a imports planner/b, planner/b imports planner/solver/c   -->   3 entries on 3 levels: a, b, solver

A level is one step of the longest chain of imports between the direct children of a package: a subpackage is one
entry, with the imports of all its files; `__init__` is none. Imports inside functions count, those for type checkers
do not, but for arrows. Children that import each other in a circle stand on a level each.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx as nx

from benchmarks.structure.source_tree import SourceModule

Layers = Sequence[frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import of a module of the tree. in_function: hidden; for_types: under `if TYPE_CHECKING`."""

    source: str
    target: str
    in_function: bool
    for_types: bool


def imports_of(module: SourceModule, names: Mapping[str, SourceModule]) -> Iterator[Import]:
    """The imports of other modules of the tree: `from a import b` is a.b where that is a module."""
    for node, in_function, for_types in import_statements(module.tree):
        for target in sorted(_targets(node, names)):
            yield Import(source=module.name, target=target, in_function=in_function, for_types=for_types)


def import_statements(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """(statement, whether a function holds it, whether only type checkers run it)."""

    def walk(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
        for child in ast.iter_child_nodes(node):
            yield child, in_function, for_types
            inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing = for_types or (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"))
            yield from walk(child, inside, typing)

    for node, in_function, for_types in walk(tree, False, False):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, in_function, for_types


def _targets(node: ast.Import | ast.ImportFrom, names: Mapping[str, SourceModule]) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & set(names)
    inner = {f"{node.module}.{alias.name}" for alias in node.names} & set(names)
    outer = {node.module} if node.module in names and len(inner) < len(node.names) else set()
    return inner | {name for name in outer if name is not None}


def room_graph(package: str, imports: Sequence[Import], modules: Mapping[str, SourceModule]) -> nx.DiGraph:
    """Direct children of a package, with an edge from each to those that it imports when it runs."""
    graph = nx.DiGraph()
    graph.add_nodes_from(sorted({entry for name in modules if (entry := _child(package, name))}))
    for each in imports:
        source, target = _child(package, each.source), _child(package, each.target)
        if source and target and source != target and not each.for_types:
            graph.add_edge(source, target)
    return graph


def _child(package: str, name: str) -> str | None:
    """The direct child of the package that the module is or lies in."""
    if not name.startswith(f"{package}."):
        return None
    return ".".join(name.split(".")[: package.count(".") + 2])


def longest_chain(graph: nx.DiGraph) -> list[str]:
    """The entries of the longest chain of imports, from its importer down."""
    merged = nx.condensation(graph)

    @cache
    def below(node: int) -> tuple[str, ...]:
        chains = [below(other) for other in sorted(merged.successors(node))]
        deepest = max(chains, key=len) if chains else ()
        return (*sorted(merged.nodes[node]["members"]), *deepest)

    longest = max([below(node) for node in sorted(merged.nodes)], key=len, default=())
    return list(longest)


def circles(graph: nx.DiGraph) -> list[list[str]]:
    """The sets of children that import each other, directly or through others."""
    return sorted(sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1)


def mutual_pairs(package: str, imports: Sequence[Import]) -> list[str]:
    """The pairs of direct children that import each other, with the number of imports each way."""
    counted = Counter(
        (source, target)
        for each in imports
        if (source := _child(package, each.source)) != (target := _child(package, each.target)) and not each.for_types
    )
    return [
        f"{source} -> {target}: {times}, back {counted[target, source]}"
        for (source, target), times in sorted(counted.items(), key=str)
        if source and target and counted[target, source] and (times, source) > (counted[target, source], target)
    ]


def arrows_up(imports: Sequence[Import], layers: Layers) -> list[str]:
    """Imports of a higher layer, those for type checkers too; rooms in no layer have none."""
    level = {room: height for height, layer in enumerate(layers) for room in layer}

    def height(name: str) -> int | None:
        return level.get(name.split(".")[1]) if "." in name else None

    found = ((height(each.source), height(each.target), f"{each.source} -> {each.target}") for each in imports)
    return sorted({arrow for low, high, arrow in found if low is not None and high is not None and low < high})


def declared_layers(test_file: Path) -> Layers:
    """The rooms of each layer, from the bottom up, as `LAYERS` of tests/test_import_order.py lists them in sets."""
    for node in ast.parse(test_file.read_text()).body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Tuple):
            continue
        if isinstance(node.target, ast.Name) and node.target.id == "LAYERS":
            return [_names_in_sets(layer) for layer in node.value.elts]
    raise ValueError(f"{test_file} assigns no tuple LAYERS")


def _names_in_sets(layer: ast.AST) -> frozenset[str]:
    sets = (node for node in ast.walk(layer) if isinstance(node, ast.Set))
    return frozenset(str(item.value) for found in sets for item in found.elts if isinstance(item, ast.Constant))
