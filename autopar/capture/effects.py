"""Take torch's effect tokens out of a joint graph.

    token_1, _ = with_effects(token_0, _linalg_check_errors, info, "linalg.inv")   -->   nothing

torch threads tokens through operators that only check or print, to keep their order. Here they would be inputs and
outputs without a meaning; the checks read values, which a graph that only computes has no place for.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node

from autopar._compat import ForwardTokenAOTInput, ForwardTokenAOTOutput, with_effects
from autopar.errors import CaptureError


def remove_effects(graph_module: GraphModule) -> None:
    """Erase checks, their tokens, the token inputs and the token outputs, in place.

    Raises CaptureError for an operator with an effect that computes something.
    """
    graph = graph_module.graph
    output = graph.output_node()
    kept = [
        (value, desc)
        for value, desc in zip(_sequence(output.args[0]), output.meta["desc"], strict=True)
        if not isinstance(desc, ForwardTokenAOTOutput)
    ]
    output.args = (tuple(value for value, _ in kept),)
    output.meta["desc"] = [desc for _, desc in kept]
    for node in reversed(list(graph.nodes)):
        if node.target is with_effects:
            _erase(node)
        elif node.op == "placeholder" and isinstance(node.meta.get("desc"), ForwardTokenAOTInput):
            graph.erase_node(node)


def _sequence(value: Any) -> list[Any]:
    return list(value)


def _erase(node: Node) -> None:
    target = node.args[1]
    for getitem in list(node.users):
        assert getitem.target is operator.getitem, f"{node.name} is used whole"
        if getitem.args[1] == 0:
            getitem.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        elif getitem.users:
            raise CaptureError(f"{target} has an effect and a result, which a graph cannot keep; compute without it")
        node.graph.erase_node(getitem)
    node.graph.erase_node(node)
