"""Which nodes of a graph run as one kernel, and what each kernel reads from and writes to memory.

The cost models and the runtime ask here, so that the planner prices the kernels that run. A group is named
by the position of its first node; views, getitem and waits are no kernel and have no group.

    y = mul(x, 2); z = gelu(y); s = sum(z)        eager: {y: 1, z: 2, s: 3}      inductor: {y: 1, z: 1, s: 1}
    inductor reads x once, writes s (and y or z only where another kernel or the output needs them)
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx

from autopar.errors import ConfigurationError
from autopar.graphs.copy_nodes import copy_direction
from autopar.graphs.node_values import VARYING
from autopar.graphs.operator_names import LOOKUPS, PARTS, base_name

POINTWISE_OPERATORS = frozenset([
    "clone", "_to_copy", "copy", "copy_", "full", "full_like", "zeros_like", "ones_like",
    "empty_like", "zeros", "ones", "arange", "scalar_tensor", "native_dropout",
    "native_dropout_backward", "bernoulli", "rand_like", "tril", "triu", "masked_fill", "where"
])  # fmt: skip
"""Operators that inductor computes element by element although torch does not tag them pointwise."""

REDUCTION_OPERATORS = frozenset([
    "sum", "mean", "amax", "amin", "argmax", "argmin", "prod", "var", "var_mean", "std", "any",
    "all", "max", "min", "norm"
])  # fmt: skip
"""Operators that may end a chain, for torch versions without Tag.reduction."""

PASS_THROUGH_OPERATORS = frozenset(["_unsafe_view", "wait_tensor", "lift_fresh"])
"""Not views by their schema, but they move no byte."""

SLICING_OPERATORS = frozenset([
    "slice", "select", "split", "split_with_sizes", "narrow", "unbind", "as_strided", "diagonal",
    "unfold"
])  # fmt: skip
"""Views of a part: two of them on one tensor read different bytes."""

NORMS_THAT_ADD = frozenset(["rms_norm", "layer_norm"])
"""Norms of ours, whose kernels may add a residual first."""

NORM_GRADIENTS_THAT_ADD = frozenset(["rms_norm_backward", "layer_norm_backward"])
"""Their backward operators, whose kernels may add a further gradient of the row; it is the last argument."""

_RESHAPES = frozenset(
    {torch.ops.aten.reshape.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}
)

Phase = Callable[[fx.Node], str]
Bytes = TypeVar("Bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBackend:
    """Who writes the kernels, as data."""

    fuses_chains: bool = False
    """Maximal chains of pointwise operators, with trailing reductions, are one kernel."""
    adds_bias_in_product: bool = False
    """A bias added to a product is part of the product's kernel (`biased_product`), where no chain took it."""
    adds_total_in_product: bool = False
    """A gradient that is a product is added to its total by the product's kernel (`added_product`)."""
    pointwise: frozenset[str] = frozenset()
    """Further operators that its chains hold."""
    free: frozenset[str] = frozenset()
    """Operators that it never runs: copies that its own order of dims and its strided kernels make needless."""


_LAYOUT_COPIES = frozenset(["clone", "contiguous", "padded", "pieces_first", "pieces_joined"])

KERNEL_BACKENDS: Mapping[str, KernelBackend] = {
    "eager": KernelBackend(adds_bias_in_product=True, adds_total_in_product=True),
    "inductor": KernelBackend(fuses_chains=True, pointwise=frozenset(["rows_at"])),
    # PyTorch as people write models: nn.Linear is addmm, products and attention read strided heads
    "torch": KernelBackend(adds_bias_in_product=True, free=_LAYOUT_COPIES),
    # Megatron-LM: bias + GELU and bias + dropout + residual are one kernel each, activations are (sequence, batch,
    # hidden), so collectives of sequence parallelism and batched products need no copy; rows of experts change places
    # in the kernel that sums those of a token
    "megatron": KernelBackend(
        fuses_chains=True,
        adds_bias_in_product=True,
        pointwise=frozenset(["dropout_by_index", "dropout_backward", "dropout", "rows_at"]),
        free=_LAYOUT_COPIES,
    ),
}
"""What the kernels of published runs are; "eager" and "inductor" are also what autopar runs, where groups that a plan
gives to kernels of ours became one operator each before it was planned (passes/kernels/use_kernels.py)."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one node moves between memory and its kernel."""

    reads: tuple[fx.Node, ...]
    """Operands (of `node.all_input_nodes`) that this node is the first of its kernel to read."""
    writes: tuple[int, ...]
    """Indices of the outputs that are written to memory (0 for a single output)."""


def phase_of_meta(node: fx.Node) -> str:
    """`node.meta["phase"]`: "forward" (also where it is missing) or "backward"."""
    return str(node.meta.get("phase", "forward"))


def kernel_groups(graph: fx.Graph, backend: str, phase: Phase = phase_of_meta) -> dict[fx.Node, int]:
    """The kernel of each node that launches one, named by the position of its first node in the graph.

    "eager": one kernel per node, but a product adds to its total. "inductor": maximal chains of pointwise nodes with
    trailing reductions, never across phases. The others: see `KERNEL_BACKENDS`. Under each of them a norm of ours takes
    the addition in front of it, or behind its gradient, that no chain holds. Raises ConfigurationError for
    another backend.
    """
    rules = KERNEL_BACKENDS.get(backend)
    if rules is None:
        raise ConfigurationError(f"unknown kernel backend {backend!r}: expected one of {', '.join(KERNEL_BACKENDS)}")
    groups = {
        node: index
        for index, node in enumerate(graph.nodes)
        if launches_kernel(node) and base_name(node.target) not in rules.free
    }
    if rules.fuses_chains:
        _merge_chains(graph, groups, phase, rules)
    if rules.adds_bias_in_product:
        _merge_biases(graph, groups)
    _merge_additions(graph, groups, phase)
    if rules.adds_total_in_product:
        for node in graph.nodes:
            product = added_product(node)
            if product is not None:
                groups[node] = groups[product]
    return groups


def group_reads_writes(graph: fx.Graph, groups: dict[fx.Node, int]) -> dict[fx.Node, Traffic]:
    """Traffic of each node with a kernel: what its group made is free, what it reads twice counts once.

    Views are transparent: reading a view reads what it views, once per group. An output is written where
    another kernel or the graph's output uses it, or where nothing uses it (it is the kernel's only result).
    """
    seen: set[tuple[int, object]] = set()
    traffic: dict[fx.Node, Traffic] = {}
    for node in graph.nodes:
        if node not in groups:
            continue
        reads = []
        for operand in node.all_input_nodes:
            key = (groups[node], _bytes_key(operand))
            if groups.get(_producer(operand)) != groups[node] and _is_tensor(operand) and key not in seen:
                reads.append(operand)
                seen.add(key)
        traffic[node] = Traffic(tuple(reads), tuple(_written_outputs(node, groups)))
    return traffic


def bytes_moved(
    node: fx.Node, traffic: Traffic, read: Callable[[fx.Node], Bytes], written: Callable[[int], Bytes]
) -> list[Bytes]:
    """What a node moves as a member of its kernel, one entry per operand read and per output written.

    `read` says the bytes of an operand, `written` those of an output: numbers of one rank, or arrays over strategies.
    A lookup reads as many bytes of its table as it returns, and so does what cuts a part out of its operand.
    """
    name = base_name(node.target)
    partly = node.all_input_nodes if name in PARTS else node.all_input_nodes[:1] if name in LOOKUPS else []
    moved = [written(0) if operand in partly else read(operand) for operand in traffic.reads]
    return moved + [written(output) for output in traffic.writes]


def launches_kernel(node: fx.Node) -> bool:
    """True for a call that computes: not for views, getitem, scalar arithmetic on sizes, collectives, and copies to the
    host and back."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in (
        "_c10d_functional",
        "c10d_functional",
    ):
        return False
    if copy_direction(node) is not None:
        return False
    return not passes_through(node) and not isinstance(node.meta.get("val"), (torch.SymInt, int, float))


def passes_through(node: fx.Node) -> bool:
    """True where the node only renames bytes: a view, an item of a tuple, a wait for a collective."""
    if node.target is operator.getitem:
        return True
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (target.is_view or base_name(target) in PASS_THROUGH_OPERATORS)


def is_pointwise(node: fx.Node) -> bool:
    """True where each output element depends on one element of each operand."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or base_name(target) in POINTWISE_OPERATORS


def is_reduction(node: fx.Node) -> bool:
    """True where output elements combine elements of one operand along dims."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    tag = getattr(torch.Tag, "reduction", None)
    return (tag is not None and tag in target.tags) or base_name(target) in REDUCTION_OPERATORS


def _merge_biases(graph: fx.Graph, groups: dict[fx.Node, int]) -> None:
    """Join an addition of a bias with the product in front of it, where the addition is a kernel of its own."""
    sizes = Counter(groups.values())
    for node in graph.nodes:
        found = biased_product(node)
        if found is not None and sizes[groups[node]] == 1:
            groups[node] = groups[found.product]


@dataclass(frozen=True, slots=True)
class BiasedProduct:
    """`rows` is the product itself or a view of it, and `bias` a vector that is added to every row."""

    product: fx.Node
    rows: fx.Node
    bias: fx.Node


def biased_product(node: fx.Node) -> BiasedProduct | None:
    """The product whose rows a node adds a bias to, if nothing else reads it; None for any other node."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    for rows, bias in (node.args, node.args[::-1]):
        if isinstance(rows, fx.Node) and isinstance(bias, fx.Node):
            product = _rows_of_product(rows)
            if product is None or len(_shape(bias)) != 1 or _dtype(bias) != _dtype(product):
                continue
            if _shape(bias) == _shape(product)[1:]:
                return BiasedProduct(product, rows, bias)
    return None


def _merge_additions(graph: fx.Graph, groups: dict[fx.Node, int], phase: Phase) -> None:
    """Join an addition with the norm of ours beside it, where nothing else shares the kernel of the addition."""
    sizes = Counter(groups.values())
    for node in graph.nodes:
        for addition in (added_rows(node), added_gradient(node)):
            if addition is not None and sizes[groups[addition]] == 1 and phase(addition) == phase(node):
                groups[addition] = groups[node] = min(groups[addition], groups[node])


def added_rows(node: fx.Node) -> fx.Node | None:
    """The addition of a residual that the kernel of a norm of ours computes in front of it; None for any other node."""
    if base_name(node.target) not in NORMS_THAT_ADD:
        return None
    x = node.args[0]
    return x if isinstance(x, fx.Node) and _is_plain_addition(x) else None


def added_gradient(node: fx.Node) -> fx.Node | None:
    """The addition to the gradient of a row that the backward kernel of a norm of ours computes, where nothing else
    reads that gradient and nothing needs the other gradients before; None for any other node."""
    if base_name(node.target) not in NORM_GRADIENTS_THAT_ADD or node.args[-1] is not None:
        return None
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    row = items.pop(0, None)
    total = next(iter(row.users), None) if row is not None and len(row.users) == 1 else None
    if total is None or not _is_plain_addition(total) or total.args[0] is total.args[1]:
        return None
    other = next(one for one in total.args if one is not row)
    assert isinstance(other, fx.Node)
    readers = [user for item in items.values() for user in item.users]
    return total if all(other < reader for reader in readers) else None


def _is_plain_addition(node: fx.Node) -> bool:
    """Whether a node adds two tensors of one shape and dtype."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    return all(
        isinstance(one, fx.Node) and _shape(one) == _shape(node) and _dtype(one) == _dtype(node) for one in node.args
    )


def _rows_of_product(node: fx.Node) -> fx.Node | None:
    """The product whose rows a chain of views holds in another shape, one reader each."""
    width = _shape(node)[-1:]
    while len(node.users) == 1 and _shape(node)[-1:] == width:
        if node.target is torch.ops.aten.mm.default:
            return node
        if node.target not in _RESHAPES:
            return None
        node = node.all_input_nodes[0]
    return None


def added_product(node: fx.Node) -> fx.Node | None:
    """The product that a node adds to a total and that nothing else reads; None for any other node."""
    if node.target is not torch.ops.aten.add_.Tensor or node.kwargs:
        return None
    product = node.args[1]
    alone = isinstance(product, fx.Node) and product.target is torch.ops.aten.mm.default and len(product.users) == 1
    return product if alone and isinstance(product, fx.Node) else None


def _shape(node: fx.Node) -> tuple[int, ...]:
    """On this rank in a lowered graph; empty where a node is no tensor."""
    shape = node.meta.get("local_shape")
    return tuple(getattr(node.meta.get("val"), "shape", ()) if shape is None else shape)


def _dtype(node: fx.Node) -> torch.dtype | None:
    return node.meta.get("dtype") or getattr(node.meta.get("val"), "dtype", None)


def _merge_chains(graph: fx.Graph, groups: dict[fx.Node, int], phase: Phase, rules: KernelBackend) -> None:
    """Join fusible neighbours of equal depth.

    The depth counts the kernels that must have ended before: it grows behind each operator that cannot be
    fused and behind each reduction, and begins anew in each phase, which becomes a graph of its own. Paths
    between two nodes of one depth hold no such operator, so a group never waits for a kernel that waits for
    the group.
    """

    def pointwise(node: fx.Node) -> bool:
        return is_pointwise(node) or base_name(node.target) in rules.pointwise

    depth: dict[fx.Node, int] = {}
    parent: dict[int, int] = {}
    for node in graph.nodes:
        same = [source for source in node.all_input_nodes if phase(source) == phase(node)]
        depth[node] = max((depth[source] + _ends_chain(source, pointwise) for source in same), default=0)
        if node not in groups or not (pointwise(node) or is_reduction(node)) or VARYING in node.meta:
            continue
        for source in map(_producer, node.all_input_nodes):
            fusible = source in groups and pointwise(source) and VARYING not in source.meta
            if fusible and depth[source] == depth[node] and phase(source) == phase(node):
                first, second = sorted((_root(parent, groups[source]), _root(parent, groups[node])))
                if first != second:
                    parent[second] = first
    groups.update({node: _root(parent, group) for node, group in groups.items()})


def _root(parent: dict[int, int], group: int) -> int:
    while group in parent:
        group = parent[group]
    return group


def _ends_chain(source: fx.Node, pointwise: Callable[[fx.Node], bool]) -> bool:
    return source.op == "call_function" and not passes_through(source) and not pointwise(source)


def _producer(node: fx.Node) -> fx.Node:
    """The node that wrote the bytes this node names: through views and getitem."""
    while passes_through(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _bytes_key(operand: fx.Node) -> object:
    """Equal for two operands that name the same bytes: whole views of one output."""
    while passes_through(operand) and operand.all_input_nodes:
        if operand.target is operator.getitem:
            source = operand.all_input_nodes[0]
            return (operand, None) if passes_through(source) else (source, operand.args[1])
        if base_name(operand.target) in SLICING_OPERATORS:
            return (operand, None)
        operand = operand.all_input_nodes[0]
    return (operand, 0)


def _written_outputs(node: fx.Node, groups: dict[fx.Node, int]) -> Iterator[int]:
    value = node.meta.get("val")
    count = len(value) if isinstance(value, (tuple, list)) else 1
    used: set[int] = set()
    outside: set[int] = set()
    for output, user in _users_through_views(node):
        used.add(output)
        if groups.get(user) != groups[node]:
            outside.add(output)
    for output in range(count):
        if output in outside or not used:
            yield output


def _users_through_views(node: fx.Node, output: int = 0) -> Iterator[tuple[int, fx.Node]]:
    """(output index, user) for each reader, views and getitem followed."""
    for user in node.users:
        if user.target is operator.getitem and not passes_through(node):
            yield from _users_through_views(user, int(user.args[1]))  # type: ignore[arg-type]
        elif passes_through(user):
            yield from _users_through_views(user, output)
        else:
            yield output, user


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is None or isinstance(value, (torch.Tensor, tuple, list))
