"""Graph lines: a lowered graph as readable Python, each line with where it comes from and what it takes.

mm = aten.mm(view, t)                          # layers.0.up/mm#0  (2048, 1024) S(0) R  190 us
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import fx

from autopar.cost_models.program_costs import COMPUTE
from autopar.passes.graph_text import statement, with_comment
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_placements, format_seconds


def graph_lines(
    graph: fx.Graph, plan: Plan, inputs: Collection[str], prices: Mapping[int, tuple[float, str]]
) -> Iterator[str]:
    """The lines of one lowered graph. inputs: names of the program's inputs; prices: position of a node -> (seconds of
    the kernel or collective that begins there, its stream)."""
    for position, node in enumerate(graph.nodes):
        if node.op == "output":
            yield statement(node)
            continue
        parts = [_owner(node, inputs), _layout(node, plan)]
        if position in prices:
            seconds, stream = prices[position]
            parts.append(format_seconds(seconds) + (f" on {stream}" if stream != COMPUTE else ""))
        comment = "  ".join(part for part in parts if part)
        yield with_comment(statement(node), comment)


def _owner(node: fx.Node, inputs: Collection[str]) -> str:
    owner = str(node.meta.get("operator", ""))
    return owner or (str(node.target) if str(node.target) in inputs else "")


def _layout(node: fx.Node, plan: Plan) -> str:
    """Local shape, and the placements of what an operator of the plan makes."""
    shape = node.meta.get("local_shape")
    if shape is None or any(isinstance(part, tuple | list) or part is None for part in shape):
        return ""
    text = f"{tuple(shape)}"
    copy = node.meta.get("redistributes")
    if copy is not None:
        return f"{text} {format_placements(copy.layout, plan.mesh)}"
    entry = plan.operators.get(str(node.meta.get("operator", "")))
    if entry is not None and entry.outputs and getattr(node.target, "namespace", "") != "_c10d_functional":
        return f"{text} {format_placements(entry.outputs[0], plan.mesh)}"
    return text
