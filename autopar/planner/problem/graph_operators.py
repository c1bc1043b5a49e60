"""What the planner reads off a program: its operators, the tensors behind views, and keys for equal operators."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from functools import partial

import torch
from torch import fx

from autopar.cost_models.operator_sizes import NORMS, SOFTMAXES, RowSizes, sizes_of, whole
from autopar.graphs.kernel_groups import Traffic, bytes_moved
from autopar.graphs.operator_names import base_name, operator_kind
from autopar.passes.tidy.place_casts import is_cast
from autopar.passes.view_layouts import viewed
from autopar.planner.problem.factorisation import Value, shape_of, value_of
from autopar.program import Program
from autopar.rules.engine import is_view, tensor_operands
from autopar.rules.rule import Rule


def base_of(node: fx.Node) -> tuple[Value, tuple[fx.Node, ...]]:
    """The tensor behind a chain of views, and the views from the last to the first."""
    views = []
    while is_view(node):
        views.append(node)
        node = viewed(node)
    return value_of(node), tuple(views)


def tensor_key(node: fx.Node) -> Hashable:
    """Equal for nodes whose outputs have equal shapes and dtypes."""
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple((tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else None for t in values)


def rule_key(rule: Rule) -> Hashable:
    """Equal for rules that say the same."""
    mappings = (
        rule.sizes, rule.reductions, rule.implementations, rule.synchronised_bytes, rule.exchanged_bytes,
        rule.ring_traffic,
    )  # fmt: skip
    said = tuple(tuple(mapping.items()) for mapping in mappings)
    return rule.inputs, rule.outputs, rule.linear, said, rule.flops


def tensor_dtype(node: fx.Node) -> torch.dtype:
    """Dtype of the tensor that a node stands for."""
    source, output = value_of(node)
    value = source.meta["val"]
    found: torch.dtype = (value[output] if isinstance(value, tuple | list) else value).dtype
    return found


def operators(program: Program) -> list[fx.Node]:
    """The operators of a program that are decisions, in its order."""
    return [node for node in program.graph.nodes if node.op == "call_function" and is_operator(node)]


def is_operator(node: fx.Node) -> bool:
    """Whether a node is a decision: it computes a tensor and is neither a view nor getitem."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return not is_view(node) and value_of(node)[0] is node and any(isinstance(v, torch.Tensor) for v in values)


def whole_rule(node: fx.Node) -> Rule:
    """The rule of an operator without one: replicated."""
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else (value,)
    return Rule(
        inputs=tuple(((None,),) * len(shape_of(*value_of(o))) for o in tensor_operands(node)),
        outputs=tuple(((None,),) * v.dim() if isinstance(v, torch.Tensor) else None for v in values),
        sizes={},
    )


def kernel_leaders(groups: dict[fx.Node, int]) -> set[fx.Node]:
    """The first node of every kernel."""
    seen: set[int] = set()
    leaders = set()
    for node, group in groups.items():
        if group not in seen:
            seen.add(group)
            leaders.add(node)
    return leaders


def kernel_shares(groups: Mapping[fx.Node, int], traffic: Mapping[fx.Node, Traffic]) -> dict[fx.Node, float]:
    """Part of its kernel's bytes that each member of a fused kernel moves, of the whole tensors."""
    members = Counter(groups.values())
    fused = [node for node, group in groups.items() if members[group] > 1]
    moved = {node: sum(bytes_moved(node, traffic[node], value_bytes, partial(value_bytes, node))) for node in fused}
    total: Counter[int] = Counter()
    for node, nbytes in moved.items():
        total[groups[node]] += nbytes
    return {node: nbytes / total[groups[node]] for node, nbytes in moved.items() if nbytes}


def kernel_rows(groups: Mapping[fx.Node, int]) -> dict[fx.Node, RowSizes]:
    """The rows by which a kernel that memory bounds is priced, of each member that has none of its own: those of its
    first member that normalises rows."""
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node, group in groups.items():
        members[group].append(node)
    found = {}
    for nodes in members.values():
        if len(nodes) > 1 and all(operator_kind(node.target) == "memory" for node in nodes):
            rows = [_rows(node) for node in nodes]
            first = next((one for one in rows if one is not None), None)
            found.update({n: first for n, one in zip(nodes, rows, strict=True) if one is None and first is not None})
    return found


def _rows(node: fx.Node) -> RowSizes | None:
    name, operands = base_name(node.target), tensor_operands(node)
    if name not in (*NORMS, *SOFTMAXES):
        return None
    sizes = sizes_of(name, [shape_of(*value_of(one)) for one in operands], shape_of(node), whole(len(operands)))
    return sizes if isinstance(sizes, RowSizes) else None


def value_bytes(node: fx.Node, output: int = 0) -> int:
    """Bytes of one output of a node; 0 where that is no tensor."""
    value = node.meta["val"]
    tensor = value[output] if isinstance(value, tuple | list) else value
    return int(tensor.numel()) * int(tensor.dtype.itemsize) if isinstance(tensor, torch.Tensor) else 0


def weight_matrices(program: Program, heavy: set[fx.Node], rules: Mapping[fx.Node, Rule]) -> set[fx.Node]:
    """Parameters with at least two dims that a heavy operator or a lookup reads, through views and a cast, and can
    read split (recurrent layers cannot); and the casts."""
    parameters = {
        node
        for node, e in zip(program.placeholders, program.inputs, strict=True)
        if e.role == "parameter" and len(e.shape) > 1
    }
    found = set()
    for node in operators(program):
        if node in heavy or "embedding" in str(node.target):
            rule = rules.get(node)
            for position, operand in enumerate(tensor_operands(node)):
                if rule is not None and not any(name for dim in rule.inputs[position] for name in dim):
                    continue
                (source, _), _ = base_of(operand)
                cast = source if is_cast(source) else None
                if cast is not None:
                    (source, _), _ = base_of(cast.all_input_nodes[0])
                if source in parameters:
                    found |= {source} if cast is None else {source, cast}
    return found
