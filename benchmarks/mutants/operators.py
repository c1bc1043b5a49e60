"""Mutation operators: the small changes that can be made to the text of a module.

    mutations_of("a.py", "def f(a, b):\\n    return a + b if a < b else 2\\n")
        return a + b if a < b else 2  -->  return a - b if a < b else 2
        return a + b if a < b else 2  -->  return a + b if a <= b else 2
        return a + b if a < b else 2  -->  return a + b if a < b else 3

Swapped are comparisons, arithmetic, `and` and `or`, min and max, any and all; constants are changed (small ones by 1,
others twofold), conditions negated, and statements that only have an effect are dropped. A number behind `flops:` or
`bytes` in a rule's string is a constant, too. Left alone is what changes no result: messages of errors, docstrings,
annotations, decorators, assertions, f-strings; and assignments of names, without which every test ends at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
COUNTED = re.compile(r"(?:flops: |bytes )(\d+)")
TEXT = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.ListComp)
LOGGERS = {"debug", "info", "warning", "warn", "error", "print"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One change. start, end: bytes of the file that `after` takes the place of; before, now: the first line that
    changes, as it is listed."""

    path: str
    line: int
    start: int
    end: int
    after: str
    before: str
    now: str

    @property
    def name(self) -> str:
        """What tells it from the others of the same commit."""
        return f"{self.path}:{self.line}:{self.start} {self.shown}"

    @property
    def shown(self) -> str:
        """The line before and after."""
        return f"{self.before}  -->  {self.now}"

    def applied(self, content: bytes) -> bytes:
        """The file with the change."""
        return content[: self.start] + self.after.encode() + content[self.end :]


def mutations_of(path: str, text: str) -> list[Mutation]:
    """Every change that can be made to a module, in the order of its lines."""
    source = _Source(path, text)
    found = [mutation for node in _code(ast.parse(text)) for mutation in _of_node(source, node)]
    return sorted(found, key=lambda mutation: (mutation.start, mutation.end, mutation.after))


class _Source:
    """Places of nodes as bytes of the file."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.content = text.encode()
        self.starts = [0]
        for line in self.content.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, end: int) -> str:
        return self.content[start:end].decode()

    def change(self, node: ast.expr | ast.stmt, after: str, span: tuple[int, int] | None = None) -> Mutation:
        """The change of a node, or of a part of it."""
        start, end = span or self.span(node)
        line = self.content.count(b"\n", 0, start) + 1
        first, last = self.starts[line - 1], self._line_end(end)
        before = self.text(first, self._line_end(start))
        now = (self.text(first, start) + after + self.text(end, last)).splitlines()[0]
        return Mutation(
            path=self.path, line=line, start=start, end=end, after=after, before=before.strip(), now=now.strip()
        )  # fmt: skip

    def _line_end(self, position: int) -> int:
        found = self.content.find(b"\n", position)
        return found if found >= 0 else len(self.content)

    def between(self, left: ast.expr, right: ast.expr, operator: str) -> tuple[int, int]:
        """Where the operator stands between two operands."""
        first, last = self.span(left)[1], self.span(right)[0]
        gap = self.text(first, last)
        match = re.search(
            r"(?<![\w])" + re.escape(operator) + r"(?![\w])" if operator[0].isalpha() else re.escape(operator), gap
        )
        assert match is not None, f"{self.path}: no {operator!r} in {gap!r}"
        return first + len(gap[: match.start()].encode()), first + len(gap[: match.end()].encode())


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes whose change could change a result."""
    for name, value in ast.iter_fields(node):
        if name in ("decorator_list", "annotation", "returns", "type_params", "bases", "keywords") and not (
            name == "keywords" and isinstance(node, ast.Call)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_silent(child):
                yield child
                if not isinstance(child, ast.Raise):
                    yield from _code(child)


def _is_silent(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_log(node.value)):
        return True
    return isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal)


def _is_log(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", "")) in LOGGERS


def _of_node(source: _Source, node: ast.AST) -> Iterator[Mutation]:
    match node:
        case ast.Compare():
            yield from _comparisons(source, node)
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_text(node):
            span = source.between(node.left, node.right, _SYMBOLS[type(node.op)])
            yield source.change(node, ARITHMETIC[type(node.op)], span)
        case ast.BoolOp():
            before, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield source.change(node, after, source.between(node.values[0], node.values[1], before))
        case ast.UnaryOp(op=ast.Not()):
            yield source.change(node, f"({source.text(*source.span(node.operand))})")
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS and not (name == "sorted" and node.keywords):
            yield source.change(node, FUNCTIONS[name], source.span(node.func))
        case ast.Constant():
            yield from _constants(source, node)
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.UnaryOp | ast.Compare):
            yield source.change(node.test, f"(not ({source.text(*source.span(node.test))}))")
        case ast.stmt() if _is_effect(node):
            yield source.change(node, "pass")
        case ast.AugAssign() if type(node.op) in ARITHMETIC:
            span = source.between(node.target, node.value, f"{_SYMBOLS[type(node.op)]}=")
            yield source.change(node, f"{ARITHMETIC[type(node.op)]}=", span)
            yield source.change(node, "pass")


def _comparisons(source: _Source, node: ast.Compare) -> Iterator[Mutation]:
    operands = [node.left, *node.comparators]
    for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
        written = _SYMBOLS[type(operator)]
        first = written.split()[0]  # `not in` and `is not` may stand on two lines
        start, end = source.between(left, right, first)
        if " " in written:
            end = source.between(left, right, written.split()[1])[1]
        yield source.change(node, COMPARISONS[type(operator)], (start, end))


def _constants(source: _Source, node: ast.Constant) -> Iterator[Mutation]:
    value = node.value
    if isinstance(value, bool):
        yield source.change(node, str(not value))
    elif isinstance(value, int):
        yield source.change(node, str(value + 1 if value < 10 else 2 * value))
    elif isinstance(value, float):
        yield source.change(node, repr(2.0 * value if value else 1.0))
    elif isinstance(value, str):
        start, end = source.span(node)
        for match in COUNTED.finditer(source.text(start, end)):
            span = start + match.start(1), start + match.end(1)
            yield source.change(node, str(int(match[1]) + 1), span)


def _is_text(node: ast.BinOp) -> bool:
    """Whether a sum or product is one of strings or lists, by its operands."""
    sides = (node.left, node.right)
    return any(
        isinstance(side, TEXT) or (isinstance(side, ast.Constant) and isinstance(side.value, str)) for side in sides
    )


def _is_effect(node: ast.stmt) -> bool:
    """Whether a statement makes no name: it calls, stores into something, or leaves."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.Raise | ast.Continue | ast.Break | ast.Delete)


_SYMBOLS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.In: "in",
    ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.BitAnd: "&", ast.BitOr: "|", ast.LShift: "<<",
    ast.RShift: ">>",
}  # fmt: skip
