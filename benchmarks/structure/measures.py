"""What is counted in a source tree, each measure one function of the syntax trees.

Lines are lines of the file: of a function from `def` to its end, docstring included, decorators not; methods and
functions inside of functions are functions. A signature is without types where an argument but `self` and `cls`, or the
result, has no annotation (a test's fixtures count, a lambda has none). A public name is a module, a class or a function
at the top of a module, or a method of a public class, that starts with no underscore; overloads and setters share the
docstring of what they belong to. A rule is a string where the table of a module `rules/table*.py` has a string, and a
function otherwise (pointwise operators, which share one string, have no entry). A number is a constant at the top of
a module, with a name in capitals, made of numbers alone.
A test mirrors a source where tests/a/test_b.py has an autopar/a/b.py, or tests/benchmarks/test_b.py a benchmarks/b.py.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.structure.import_graph import (
    Import,
    Layers,
    arrows_up,
    circles,
    import_statements,
    imports_of,
    longest_chain,
    mutual_pairs,
    room_graph,
)
from benchmarks.structure.source_tree import SourceModule, read_modules

Modules = Mapping[str, SourceModule]
_PIPELINE_IS_NONE = re.compile(r"\bpipeline is (?:not )?None\b")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def structure(root: Path, layers: Layers, package: str = "autopar") -> dict[str, Any]:
    """All measures of a tree; its tests lie in `tests/`."""
    modules = read_modules(root, package)
    imports = [each for module in modules.values() for each in imports_of(module, modules)]
    return {
        "sizes": sizes(modules),
        "rooms": rooms(package, modules, imports, layers),
        "imports": hidden_imports(modules.values()),
        "signatures_without_types": untyped_signatures(modules.values()),
        "public_names_without_docstring": undocumented(modules.values()),
        "rules": rule_entries(modules.values()),
        "names": repeated_names(modules.values()),
        "pipeline_is_none": pipeline_questions(modules.values()),
        "planner_constants": numeric_constants(modules, f"{package}.planner"),
        "tests": mirrored_tests(root, package, modules),
    }


def sizes(modules: Modules) -> dict[str, Any]:
    """Lines of files, functions and classes: how many there are, medians, and the largest with its name."""
    files = {module.path: module.lines for module in modules.values()}
    functions = dict(_lengths(modules.values(), _Function))
    classes = dict(_lengths(modules.values(), ast.ClassDef))
    return {
        "source_lines": sum(files.values()),
        "modules": len(files),
        "lines_per_file": _spread(files),
        "functions": len(functions),
        "lines_per_function": _spread(functions),
        "functions_over_40_lines": sum(lines > 40 for lines in functions.values()),
        "classes": len(classes),
        "largest_class": _largest(classes),
    }


def _lengths(modules: Iterable[SourceModule], kind: Any) -> Iterator[tuple[str, int]]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, kind):
                yield f"{module.path}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def _largest(lengths: Mapping[str, int]) -> dict[str, Any]:
    name = max(lengths, key=lambda name: lengths[name], default="")
    return {"lines": lengths.get(name, 0), "name": name}


def _spread(lengths: Mapping[str, int]) -> dict[str, Any]:
    return {"median": median(lengths.values()) if lengths else 0, "largest": _largest(lengths)}


def rooms(package: str, modules: Modules, imports: Sequence[Import], layers: Layers) -> dict[str, Any]:
    """Per package its entries and levels; between the rooms of the whole circles, pairs and arrows up."""
    packages = [module.name for module in modules.values() if module.is_package]
    graphs = {name: room_graph(name, imports, modules) for name in sorted(packages)}
    chains = {name: longest_chain(graph) for name, graph in graphs.items()}
    return {
        "packages": {
            name: {"entries": len(graph), "levels": len(chains[name])} for name, graph in graphs.items() if len(graph)
        },
        "longest_chains": {package: chains[package], "planner": chains.get(f"{package}.planner", [])},
        "circles_between_children": [" <-> ".join(circle) for graph in graphs.values() for circle in circles(graph)],
        "pairs_that_import_each_other": mutual_pairs(package, imports),
        "arrows_up": arrows_up(imports, layers),
    }


def hidden_imports(modules: Iterable[SourceModule]) -> dict[str, Any]:
    """Where statements import inside of functions, and how many run for type checkers only."""
    hidden, for_types = [], 0
    for module in modules:
        for statement, in_function, typing in import_statements(module.tree):
            for_types += typing
            if in_function and not typing:
                hidden.append(f"{module.path}:{statement.lineno}")
    return {"hidden": hidden, "for_type_checkers": for_types}


def untyped_signatures(modules: Iterable[SourceModule]) -> list[str]:
    """Where functions lack the type of an argument or of their result."""
    return [
        f"{module.path}:{node.lineno} {node.name}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, _Function) and not _is_typed(node)
    ]


def _is_typed(function: _Function) -> bool:
    a = function.args
    given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(extra for extra in (a.vararg, a.kwarg) if extra)]
    bare = [argument for argument in given if argument.annotation is None and argument.arg not in ("self", "cls")]
    return not bare and function.returns is not None


def undocumented(modules: Iterable[SourceModule]) -> list[str]:
    """Public modules, classes, functions and methods without a docstring."""
    return [
        f"{module.path}:{getattr(node, 'lineno', 1)} {name}"
        for module in modules
        for name, node in _public_nodes(module)
        if not ast.get_docstring(node)
    ]


def _public_nodes(module: SourceModule) -> Iterator[tuple[str, Any]]:
    if any(part.startswith("_") and part != "__main__" for part in module.name.split(".")[1:]):
        return
    yield module.name, module.tree
    for node in _documented_apart(module.tree.body):
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{inner.name}", inner) for inner in _documented_apart(node.body))


def _documented_apart(body: Sequence[ast.stmt]) -> Iterator[ast.ClassDef | _Function]:
    for node in body:
        if isinstance(node, ast.ClassDef | _Function) and not node.name.startswith("_"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not any(each.endswith(("overload", ".setter")) for each in decorators):
                yield node


def rule_entries(modules: Iterable[SourceModule]) -> dict[str, Any]:
    """How many operators have a string in the tables of rules, and how many a function."""
    entries: dict[str, bool] = {}
    for module in modules:
        folder, _, name = module.path.rpartition("/")
        if folder.endswith("/rules") and name.startswith("table"):
            entries.update(_table_entries(module.tree))
    strings = sum(entries.values())
    return {
        "strings": strings,
        "functions": len(entries) - strings,
        "share_of_strings": round(strings / max(len(entries), 1), 3),
        "with_functions": sorted(name for name, is_string in entries.items() if not is_string),
    }


def _table_entries(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """(operator, whether a string stands for it) of the dicts at the top of a module."""
    texts = (node for node in tree.body if isinstance(node, ast.Assign) and _is_text(node.value))
    named = {ast.unparse(node.targets[0]) for node in texts}
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        for key, rule in zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ():
            if isinstance(key, ast.Constant) and "." in str(key.value):
                yield str(key.value), _is_text(rule) or ast.unparse(rule) in named


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def repeated_names(modules: Iterable[SourceModule]) -> dict[str, Any]:
    """Names of modules, and of public classes at the top of modules, that occur more than once, with how often."""
    files, classes = Counter[str](), Counter[str]()
    for module in modules:
        if not module.is_package:
            files[Path(module.path).stem] += 1
        names = (node.name for node in module.tree.body if isinstance(node, ast.ClassDef))
        classes.update(name for name in names if not name.startswith("_"))
    return {kind: _repeated(counted) for kind, counted in (("modules", files), ("classes", classes))}


def _repeated(counted: Counter[str]) -> dict[str, int]:
    return {name: times for name, times in sorted(counted.items()) if times > 1}


def pipeline_questions(modules: Iterable[SourceModule]) -> dict[str, Any]:
    """How often, and in which files, `pipeline is None` (or `is not None`) is asked."""
    found = {module.path: len(_PIPELINE_IS_NONE.findall(module.text)) for module in modules}
    asked = {path: times for path, times in found.items() if times}
    return {"times": sum(asked.values()), "files": len(asked), "where": asked}


def numeric_constants(modules: Modules, package: str) -> dict[str, Any]:
    """Named numbers at the top of the modules of a package, with those files that have most."""
    counted = Counter[str]()
    for module in modules.values():
        if module.name == package or module.name.startswith(f"{package}."):
            counted[module.path] = sum(_named_numbers(module.tree))
    return {"numbers": sum(counted.values()), "most": {path: n for path, n in counted.most_common(5) if n}}


def _named_numbers(tree: ast.Module) -> Iterator[int]:
    """How many names each statement gives to numbers: `A, B = 1, 2 ** 20` has two."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        value = node.value
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs: list[tuple[ast.expr, ast.expr | None]] = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            yield sum(isinstance(name, ast.Name) and name.id.isupper() and _is_number(each) for name, each in pairs)


def _is_number(value: ast.expr | None) -> bool:
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    if isinstance(value, ast.BinOp):
        return _is_number(value.left) and _is_number(value.right)
    return (
        isinstance(value, ast.Constant) and isinstance(value.value, int | float) and not isinstance(value.value, bool)
    )


def mirrored_tests(root: Path, package: str, modules: Modules) -> dict[str, Any]:
    """How many test files lie where a module of that path and name stands, and how many modules have such a test."""
    tests = [path.relative_to(root / "tests") for path in sorted((root / "tests").rglob("test_*.py"))]
    tested = {path.with_name(path.name.removeprefix("test_")) for path in tests}
    sources = {Path(module.path).relative_to(package) for module in modules.values() if not module.is_package}
    others = {path.relative_to(root) for path in (root / "benchmarks").rglob("*.py")}
    mirroring = tested & (sources | others)
    return {
        "files": len(tests),
        "mirror_a_path": len(mirroring),
        "share": round(len(mirroring) / max(len(tests), 1), 3),
        "modules": len(sources),
        "modules_with_a_test": len(tested & sources),
        "without_a_module": sorted(path.as_posix() for path in tested - mirroring),
    }
