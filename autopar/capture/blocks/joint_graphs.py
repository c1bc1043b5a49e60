"""The joint graph of a short trace as a sheet of rows, and a sheet as a graph again, named as a whole trace names it.

torch names a node by its operator and a count of those made before, nodes that were removed again included. So a sheet
keeps the names that were asked for, in order; the same members repeat them, and asking again gives the names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Target

from autopar._compat import (
    GradAOTOutput,
    InputMutationAOTOutput,
    LazyGraphModule,
    NameSpace,
    OpOverload,
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from autopar.capture.blocks.equal_members import Run
from autopar.capture.blocks.sheets import Extension, Operand, Row, Salt, Sweep, UnprovenError
from autopar.capture.roles import PREFIX
from autopar.ops.random import SITE_BIT
from autopar.passes.tidy.inline_constants import MAX_ELEMENTS
from autopar.rules.call import argument_slot

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_FROM_CALLS = ("attention", "attention_backward", "attention_backward_with_mask", "dropout")
"""Operators that take their salt from the calls of the forward; others take it where they are traced."""
_NUMBERED = re.compile(r"(primals_|tangents_|arg|_tensor_constant)(\d+)((?:_1)?)")
"""Names of placeholders and of constants, which are counted in order."""
_CONSTANT = "_tensor_constant"


@dataclass(frozen=True, slots=True)
class _Source:
    """The node, or the place among the returned values, of which a row is made; then what its paths are renamed to."""

    node: Node
    returned: int | None = None
    renamed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Sheet:
    """rows: nodes but the output, then what it returns. asked: (name asked for, its row or None) in order."""

    rows: list[Row]
    asked: list[tuple[str, int | None]]

    @classmethod
    def of(cls, graph: Graph, names: Iterable[tuple[str, str]]) -> Sheet:
        """The sheet of a graph in which `names` were asked for and given."""
        nodes = [node for node in graph.nodes if node.op != "output"]
        positions = {node: position for position, node in enumerate(nodes)}
        rows = [_row(node, positions) for node in nodes]
        output = graph.output_node()
        for at, value in enumerate(output.args[0]):  # type: ignore[arg-type]
            leaf = Operand(positions[value]) if isinstance(value, Node) else value
            rows.append(Row("output", (leaf,), source=_Source(output, at)))
        by_name = {node.name: position for node, position in positions.items()}
        return cls(rows, [(asked, by_name.get(given)) for asked, given in names])

    def extended(self, run: Run) -> Sheet:
        """The sheet with all members of a run of which the traced ones stand here. Raises UnprovenError."""
        extension = Extension(_of_members(self.rows, run), len(run.names))
        paths = [PREFIX + path for path in run.members]
        rows = [
            placed.row if placed.member is None else _renamed(placed.row, run, paths[placed.member])
            for placed in extension.placed
        ]
        return Sheet([replace(row, member=None, kind="") for row in rows], _asked_by_all(self, extension))

    def written(self, module: GraphModule) -> GraphModule:
        """The graph module of the sheet; constants and the meaning of the returned values are those of `module`."""
        graph, space = Graph(), NameSpace()
        constants: dict[str, Any] = {}
        names: dict[int, str] = {}
        counts: dict[str, int] = {}
        for asked, position in self.asked:
            numbered = _NUMBERED.fullmatch(asked)
            if numbered:
                first = 0 if numbered[1] in (_CONSTANT, "arg") else 1
                number = counts[numbered[1]] = counts.get(numbered[1], first - 1) + 1
                asked = f"{numbered[1]}{number}{numbered[3]}"
            name = str(space.create_name(asked, None))
            if position is not None:
                names[position] = name
        stacks: dict[Any, Any] = {}
        nodes: list[Node] = []
        returned, meanings = [], []
        for position, row in enumerate(self.rows):
            source: _Source = row.source
            if source.returned is None:
                nodes.append(_written(graph, row, nodes, names[position], stacks))
                if source.node.op == "get_attr":
                    constants[str(nodes[-1].target)] = getattr(module, str(source.node.target))
                continue
            (leaf,) = row.leaves
            returned.append(nodes[leaf.position] if isinstance(leaf, Operand) else leaf)
            meanings.append(_described(source.node.meta["desc"][source.returned], source.renamed))
        output = graph.output(tuple(returned))
        output.meta = {**module.graph.output_node().meta, "desc": meanings}
        graph._graph_namespace = space
        return LazyGraphModule(constants, graph)


def _row(node: Node, positions: Mapping[Node, int]) -> Row:
    source = _Source(node)
    values = [(tuple(v.shape), v.stride(), v.dtype) for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    if node.op == "get_attr":
        return _constant_row(node, values)
    if node.op != "call_function":
        return Row((node.op, type(node.meta["desc"]).__name__, values), (), source=source)
    leaves, spec = tree_flatten((_with_salt(node), node.kwargs))
    return Row(
        (node.target, spec, values),
        tuple(Operand(positions[leaf]) if isinstance(leaf, Node) else leaf for leaf in leaves),
        source=source,
    )


def _constant_row(node: Node, values: Any) -> Row:
    """A constant of the model's code: its number is that of a counter, its value must be equal on all members."""
    tensor = getattr(node.graph.owning_module, str(node.target))
    numbered = _NUMBERED.fullmatch(str(node.target))
    if numbered is None or not isinstance(tensor, Tensor) or tensor.numel() > MAX_ELEMENTS or tensor.is_meta:
        return Row((node.op, node.target, values), (), source=_Source(node))
    value = (tensor.dtype, tuple(tensor.shape), repr(tensor.tolist()))
    return Row((node.op, value, values), (Salt(_CONSTANT, int(numbered[2])),), source=_Source(node))


def _with_salt(node: Node) -> Sequence[Any]:
    """The arguments, in which a salt is marked as such."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "autopar":
        return node.args
    if all(argument.name != "salt" for argument in target._schema.arguments):
        return node.args
    at, _ = argument_slot(target, "salt")
    value = node.args[at]
    assert isinstance(value, int)
    calls = target.overloadpacket.__name__ in _FROM_CALLS and not value & SITE_BIT
    counter = "calls" if calls else "dropout sites" if value & SITE_BIT else "sites"
    return (*node.args[:at], Salt(counter, value), *node.args[at + 1 :])


def _of_members(rows: Sequence[Row], run: Run) -> list[Row]:
    """The rows with the member of the run that each belongs to: by the module that ran it, by the parameter or buffer
    that it is, and casts outside of any module by what they cast."""
    root = PREFIX + run.path + "." if run.path else PREFIX
    index = {path.removeprefix(root): number for number, path in enumerate(PREFIX + path for path in run.traced)}
    found: list[Row] = []
    phase = "forward"
    for row in rows:
        node = row.source.node
        if row.source.returned is not None:
            meaning = node.meta["desc"][row.source.returned]
            path, kind = _path_of(meaning), type(meaning).__name__
        elif node.op == "placeholder":
            path, kind = _path_of(node.meta["desc"]), type(node.meta["desc"]).__name__
        else:
            if any(_is_tangent(found[leaf.position]) for leaf in row.leaves if isinstance(leaf, Operand)):
                phase = "backward"
            path, kind = _innermost(node), phase
        member = index.get(path[len(root) :].partition(".")[0]) if path.startswith(root) else None
        if path == "" and node.target is torch.ops.aten._to_copy.default and isinstance(row.leaves[0], Operand):
            member, kind = found[row.leaves[0].position].member, f"casts in {phase}"
        found.append(replace(row, member=member, kind=kind))
    return found


def _is_tangent(row: Row) -> bool:
    return row.kind == "TangentAOTInput"


def _innermost(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def _path_of(meaning: Any) -> str:
    """The parameter or buffer that a placeholder or a returned value is about."""
    if isinstance(meaning, GradAOTOutput):
        meaning = meaning.grad_of
    elif isinstance(meaning, InputMutationAOTOutput):
        meaning = meaning.mutated_input
    return str(getattr(meaning, "target", ""))


def _renamed(row: Row, run: Run, path: str) -> Row:
    assert row.member is None or row.member in (1, 2)
    olds = [PREFIX + each for each in run.traced[1:3]]
    source: _Source = row.source
    renames = tuple((old, path) for old in olds if old != path)
    return replace(row, source=replace(source, renamed=source.renamed + renames))


def _asked_by_all(sheet: Sheet, extension: Extension) -> list[tuple[str, int | None]]:
    """The names that are asked for where all members stand: what the rows of a member ask for, for each of them."""
    places = {position: at for at, (_, position) in enumerate(sheet.asked) if position is not None}
    found: list[tuple[str, int | None]] = []
    at = 0
    for index, sweep in enumerate(extension.sweeps):
        if sweep.inner[0] not in places:
            continue  # returned values have no names
        first, stop, asked = _asked_by_inner(sheet, places, sweep)
        found += _moved(sheet.asked[at:first], extension)
        for template, positions in extension.inner(index):
            start = sweep.segments[template][0]
            found += [(name, None if row is None else positions[row - start]) for name, row in asked[template]]
        at = stop
    return found + _moved(sheet.asked[at:], extension)


def _asked_by_inner(
    sheet: Sheet, places: Mapping[int, int], sweep: Sweep
) -> tuple[int, int, dict[int, list[tuple[str, int | None]]]]:
    """Where the names of members 1 and 2 begin and end, and those of each. Names of nodes that are gone may belong to
    the rows before or behind them; the first or the last member need not have any, so one way must fit."""
    ways: tuple[Callable[[int], int], ...] = (lambda row: places[row], lambda row: places.get(row - 1, -1) + 1)
    for start_of in ways:
        asked = {member: sheet.asked[start_of(start) : start_of(stop)] for member, (start, stop) in _inner(sweep)}
        if _kinds(asked[1]) == _kinds(asked[2]):
            break
    else:
        raise UnprovenError("the names of the second and third member differ")
    for member, (start, stop) in _inner(sweep):
        if [row for _, row in asked[member] if row is not None] != list(range(start, stop)):
            raise UnprovenError("nodes of a member are not in the order in which they were made")
        if any(row is None and name in _DRAWING for name, row in asked[member]):
            raise UnprovenError("a draw of a member is used by nobody")
    return start_of(sweep.inner[0]), start_of(sweep.inner[1]), asked


def _inner(sweep: Sweep) -> list[tuple[int, tuple[int, int]]]:
    return [(member, sweep.segments[member]) for member in (1, 2)]


_DRAWING = frozenset(("attention", "dropout", "uniform", "normal", "exponential", "integers"))


def _kinds(asked: Sequence[tuple[str, int | None]]) -> list[str]:
    """The names without the numbers of what is counted in order."""
    return [_NUMBERED.sub(r"\1", name) for name, _ in asked]


def _moved(asked: Sequence[tuple[str, int | None]], extension: Extension) -> list[tuple[str, int | None]]:
    return [(name, None if row is None else extension.new_position(row)) for name, row in asked]


def _written(graph: Graph, row: Row, nodes: Sequence[Node], name: str, stacks: dict[Any, Any]) -> Node:
    source: _Source = row.source
    template = source.node
    target: Target = name if template.op == "placeholder" else template.target
    if template.op == "get_attr" and row.leaves:
        target = f"{_CONSTANT}{row.leaves[0].value}"
    args, kwargs = (), {}
    if template.op == "call_function":
        leaves = [_value(leaf, nodes) for leaf in row.leaves]
        spec: TreeSpec = row.what[1]  # type: ignore[index]
        args, kwargs = tree_unflatten(leaves, spec)
    node = graph.create_node(template.op, target, tuple(args), kwargs, name)
    node.meta = {**template.meta}
    for key in _STACKS:
        stack = node.meta.get(key)
        if stack and source.renamed:
            known = (id(stack), source.renamed)
            if known not in stacks:
                stacks[known] = _stack(stack, source.renamed)
            node.meta[key] = stacks[known]
    if "desc" in node.meta:
        node.meta["desc"] = _described(node.meta["desc"], source.renamed)
    return node


def _value(leaf: Any, nodes: Sequence[Node]) -> Any:
    if isinstance(leaf, Operand):
        return nodes[leaf.position]
    return leaf.value if isinstance(leaf, Salt) else leaf


def _stack(stack: Mapping[str, Any], renamed: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {_path(key, renamed): (_path(path, renamed), kind) for key, (path, kind) in stack.items()}


def _path(path: str, renamed: Sequence[tuple[str, str]]) -> str:
    for old, new in renamed:
        if path == old or path.startswith(f"{old}."):
            return new + path[len(old) :]
    return path


def _described(meaning: Any, renamed: Sequence[tuple[str, str]]) -> Any:
    """What a placeholder or returned value is, for the member of the new path."""
    if not renamed:
        return meaning
    if isinstance(meaning, GradAOTOutput):
        return dataclasses.replace(meaning, grad_of=_described(meaning.grad_of, renamed))
    if isinstance(meaning, InputMutationAOTOutput):
        return dataclasses.replace(meaning, mutated_input=_described(meaning.mutated_input, renamed))
    target = getattr(meaning, "target", None)
    return meaning if target is None else dataclasses.replace(meaning, target=_path(target, renamed))
