"""The fingerprint of a program: equal for equal content, whatever torch calls its nodes.

It covers roles, names, shapes and dtypes of inputs and outputs, and every operator with its operands by position, its
constants, and the shape and dtype of what it computes. Plans carry it, so that a plan is not used for another model.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autopar._compat import OpOverload, tree_leaves
from autopar.program import Program


def fingerprint(program: Program) -> str:
    """sha256 (hex) over the inputs, the outputs and the tidied graph of `program`."""
    digest = hashlib.sha256()
    for value in program.inputs:
        digest.update(f"{value.role} {value.name} {value.shape} {value.dtype} {value.requires_grad}\n".encode())
    for output in program.outputs:
        digest.update(f"{output.role} {output.name}\n".encode())
    positions: dict[Node, int] = {}
    for node in program.graph.nodes:
        digest.update(f"{_describe(node, positions)}\n".encode())
        positions[node] = len(positions)
    return digest.hexdigest()


def _describe(node: Node, positions: dict[Node, int]) -> str:
    target = _target_name(node.target) if node.op == "call_function" else node.op
    arguments = [] if node.op == "placeholder" else [_spell(node.args, positions), _spell(node.kwargs, positions)]
    values = [f"{tuple(v.shape)}{v.dtype}" for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    return " ".join([target, *arguments, *values, node.meta.get("operator", "")])


def _target_name(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else f"{target.__module__}.{target.__qualname__}"


def _spell(value: Any, positions: dict[Node, int]) -> str:
    if isinstance(value, Node):
        return f"%{positions[value]}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_spell(item, positions) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_spell(item, positions)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    return repr(value)
