"""Mixed precision in the planner: gathers move the narrow cast of a parameter, sums of its gradient are wide.

    w16 = to(w, bf16)       on the stored part of the fp32 master
    all_gather(w16)         bf16
    g16 = mm(a, b)          each rank's part, summed locally
    g = to(g16, fp32)       still a part: Partial in, Partial out
    all_reduce(g)           fp32

A reduction before the cast would move half the bytes and lose the digits, so the planner may not choose it: values
between the operator that sums over the batch and the cast keep their Partial placements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from autopar.passes.tidy.place_casts import is_cast
from autopar.planner.problem.factorisation import Value
from autopar.planner.problem.graph_operators import base_of, operators, tensor_dtype
from autopar.program import Program
from autopar.rules.engine import tensor_operands
from autopar.rules.rule import Rule


def values_summed_wide(
    program: Program, rules: Mapping[fx.Node, Rule], is_activation: Callable[[Value], bool]
) -> set[Value]:
    """Values on the way to a widening cast in backward that pass their Partial placements on.

    is_activation: whether a value has the batch dim; sums of those over ranks are no gradients of parameters. A value
    counts only where every reader passes Partial on, up to the cast.
    """
    readers = _readers(program)
    found: set[Value] = set()
    passing: set[fx.Node] = set()
    for node in reversed(operators(program)):
        if node.meta["phase"] != "backward":
            continue
        if (is_cast(node) and _dtype_change(node) > 0) or ((node, 0) in found and not _is_multiple(node)):
            passing.add(node)
            for operand in tensor_operands(node):
                value, _ = base_of(operand)
                if not is_activation(value) and all(_passes(r, i, passing, rules) for r, i in readers[value]):
                    found.add(value)
    return found


def masters(program: Program) -> set[fx.Node]:
    """Parameters that are read through narrowing casts alone."""
    return {
        node
        for node, entry in zip(program.placeholders, program.inputs, strict=True)
        if entry.role == "parameter" and all(is_cast(user) and _dtype_change(user) < 0 for user in node.users)
    }


def _dtype_change(cast: fx.Node) -> int:
    """Bytes per element that a cast adds."""
    return int(cast.meta["val"].dtype.itemsize - tensor_dtype(cast.all_input_nodes[0]).itemsize)


def _is_multiple(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], tuple | list)


def _passes(reader: fx.Node | None, operand: int, passing: set[fx.Node], rules: Mapping[fx.Node, Rule]) -> bool:
    return reader in passing and reader in rules and any(pattern[operand] for pattern in rules[reader].linear)


def _readers(program: Program) -> dict[Value, list[tuple[fx.Node | None, int]]]:
    """(operator, operand index) of everyone who reads a value; None for the output of the graph."""
    found: dict[Value, list[tuple[fx.Node | None, int]]] = {}
    for node in operators(program):
        for index, operand in enumerate(tensor_operands(node)):
            found.setdefault(base_of(operand)[0], []).append((node, index))
    for node in program.returned:
        if isinstance(node, fx.Node):
            found.setdefault(base_of(node)[0], []).append((None, 0))
    return found
