"""Made once: what follows from parameters alone, and so may be made once per step and not once per micro-batch.

    w (parameter) -> its copies in other layouts -> casts of it in forward -> their copies
"""

from __future__ import annotations

from torch import fx

from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.problem.build import Built
from autopar.planner.problem.graph_operators import base_of
from autopar.rules.engine import tensor_operands


def operators_once(built: Built, lifetimes: Lifetimes) -> frozenset[fx.Node]:
    """Operators of forward that follow from parameters alone."""
    found: set[fx.Node] = set()
    for node in lifetimes.in_order:
        operands = [base_of(operand)[0][0] for operand in tensor_operands(node)]
        if node.meta["phase"] != "backward" and operands and all(_follows(built, one, found) for one in operands):
            found.add(node)
    return frozenset(found)


def _follows(built: Built, node: fx.Node, operators: set[fx.Node]) -> bool:
    if node.op == "placeholder":
        index = built.placeholders.get(node)
        return index is not None and built.variables[index].kind == "parameter"
    return node in operators


def variables_once(built: Built, operators: frozenset[fx.Node]) -> frozenset[int]:
    """The variables of `operators_once`, of parameters, and of the copies of both."""
    parameters = {i for i, variable in enumerate(built.variables) if variable.kind == "parameter"}
    made = {built.operators[node] for node in operators}
    copies = {
        index
        for (value, _), index in built.copies.items()
        if value[0] in operators or built.placeholders.get(value[0]) in parameters
    }
    return frozenset(parameters | made | copies)
