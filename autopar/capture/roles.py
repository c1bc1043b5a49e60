"""What the placeholders and returned values of a joint graph are, read from AOT autograd's descriptors.

Positions are never trusted. Parameters that are one tensor under several names (tied) become one placeholder, and
their gradients are summed. Gradients of inputs that nobody wants (None) are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from autopar._compat import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from autopar.errors import CaptureError
from autopar.program import Input, InputRole, Output, OutputRole

log = logging.getLogger(__name__)

PREFIX = "model."  # the model's attribute in the wrapper that is traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the caller knows: names of input and output tensors, batch dims, which outputs are guards, which the loss,
    which parameters, inputs and outputs require a gradient, and the first name of each tied tensor by any of its names
    (`canonical`)."""

    inputs: Sequence[str]
    batch_dims: Sequence[int | None]
    outputs: Sequence[str]
    guards: frozenset[str]
    loss: int | None
    canonical: dict[str, str]
    requires_grad: frozenset[tuple[InputRole | OutputRole, str]]


@dataclass(slots=True)
class _Returned:
    role: OutputRole
    name: str
    node: Node
    requires_grad: bool = False


def assign_roles(graph_module: GraphModule, names: Names) -> tuple[tuple[Input, ...], tuple[Output, ...]]:
    """Rewrite placeholders and outputs of the joint graph in place; one role per placeholder and returned value."""
    graph = graph_module.graph
    output = graph.output_node()
    returned = _read_outputs(output, names)
    inputs = _read_inputs(graph, names)
    _check_names(inputs)
    _merge_tied_gradients(graph, output, returned)
    order: dict[OutputRole, int] = {"mutation": 0, "loss": 1, "output": 1, "guard": 1, "gradient": 2}
    returned.sort(key=lambda value: order[value.role])
    output.args = (tuple(value.node for value in returned),)
    output.meta.pop("desc", None)
    graph.set_codegen(CodeGen())  # AOT autograd's expects nested arguments
    return inputs, tuple(Output(role=v.role, name=v.name, requires_grad=v.requires_grad) for v in returned)


def _read_outputs(output: Node, names: Names) -> list[_Returned]:
    returned = []
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
        if not isinstance(node, Node):
            continue
        if isinstance(desc, PlainAOTOutput):
            name = names.outputs[desc.idx]
            role: OutputRole = "guard" if name in names.guards else "loss" if desc.idx == names.loss else "output"
            returned.append(_Returned(role, name, node, ("output", name) in names.requires_grad))
        elif isinstance(desc, InputMutationAOTOutput):
            if _is_buffer(desc.mutated_input, names):
                returned.append(_Returned("mutation", _input_name(desc.mutated_input, names), node))
        elif isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, BufferAOTInput):
            log.warning(
                "forward asks for a gradient of the buffer %s: none is computed", _input_name(desc.grad_of, names)
            )
        elif isinstance(desc, GradAOTOutput):
            returned.append(_Returned("gradient", _input_name(desc.grad_of, names), node))
        else:
            raise CaptureError(
                f"the model returns {desc!r}, which cannot be compiled: return plain tensors that do not share "
                "memory (clone() them)"
            )
    return returned


def _is_buffer(desc: Any, names: Names) -> bool:
    """Whether what forward changed in place is a buffer. Raises CaptureError for a parameter; warns for an input."""
    name = _input_name(desc, names)
    if isinstance(desc, ParamAOTInput):
        raise CaptureError(
            f"forward changes the parameter {name} in place: compute a new tensor from it (weight.clamp(...) instead "
            "of weight.data.clamp_(...)), or change it after the optimizer's step"
        )
    if isinstance(desc, PlainAOTInput):
        log.warning("forward changes its input %s in place: the caller's tensor keeps its values", name)
        return False
    return True


def _read_inputs(graph: Graph, names: Names) -> tuple[Input, ...]:
    """Inputs in placeholder order; further names of a tied tensor are merged into the first and their node removed."""
    first_of: dict[tuple[str, str], Node] = {}
    found: dict[Node, Input] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        desc, value = node.meta["desc"], node.meta["val"]
        role, name = _input_role(desc, names), _input_name(desc, names)
        first = first_of.setdefault((role, name), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            continue
        aliases = tuple(alias for alias, main in names.canonical.items() if main == name and alias != name)
        found[node] = Input(
            role=role,
            name=name,
            shape=tuple(value.shape),
            dtype=value.dtype,
            requires_grad=(role, name) in names.requires_grad,
            aliases=aliases if role in ("parameter", "buffer") else (),
            batch_dim=names.batch_dims[desc.idx] if isinstance(desc, PlainAOTInput) else None,
        )
        node.meta["operator"] = name
    return tuple(found.values())


def _input_role(desc: Any, names: Names) -> InputRole:
    if isinstance(desc, ParamAOTInput):
        return "parameter"
    if isinstance(desc, BufferAOTInput):
        return "buffer"
    if isinstance(desc, TangentAOTInput):
        return "tangent"
    assert isinstance(desc, PlainAOTInput), f"input of unknown kind: {desc!r}"
    return "input"


def _input_name(desc: Any, names: Names) -> str:
    if isinstance(desc, (ParamAOTInput, BufferAOTInput)):
        name = desc.target.removeprefix(PREFIX)
        return names.canonical.get(name, name)
    if isinstance(desc, TangentAOTInput):
        assert isinstance(desc.output, PlainAOTOutput), f"tangent of {desc.output!r}"
        return names.outputs[desc.output.idx]
    assert isinstance(desc, PlainAOTInput), f"input of unknown kind: {desc!r}"
    return names.inputs[desc.idx]


def _check_names(inputs: Sequence[Input]) -> None:
    """Raises CaptureError where an input that wants a gradient has the name of a parameter: gradients go by name."""
    parameters = {name for value in inputs if value.role == "parameter" for name in (value.name, *value.aliases)}
    for value in inputs:
        if value.role == "input" and value.requires_grad and value.name in parameters:
            raise CaptureError(f"the input {value.name} wants a gradient and a parameter has its name: rename one")


def _merge_tied_gradients(graph: Graph, output: Node, returned: list[_Returned]) -> None:
    first_of: dict[str, _Returned] = {}
    for value in [v for v in returned if v.role == "gradient"]:
        first = first_of.setdefault(value.name, value)
        if first is value:
            continue
        with graph.inserting_before(output):
            total = graph.call_function(torch.ops.aten.add.Tensor, (first.node, value.node))
        total.meta = {k: v for k, v in first.node.meta.items() if k in ("val", "fwd_nn_module_stack")}
        first.node = total
        returned.remove(value)
