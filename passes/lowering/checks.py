"""The checker: what the graphs of a stage say is what they must hold, behind every pass (as `jax.core.check_jaxpr`).

- every value is made before it is read, in the same graph
- every call gives the local shape and dtype that its node says, run without values on what its operands say
- what an operator makes has the block of the layout that the plan gives it
- inputs, gradients and what forward hands to backward agree on both sides; nothing is saved that the plan recomputes
- a collective names axes of the mesh, in its order, and the size of their group
- the ranks of a group start the same collectives in the same order (`check_ranks`)

Raises `CheckFailed` naming pass, stage, node and both sides. It runs in every test and under AUTOPAR_CHECK=1.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from autopar._compat import FakeTensorMode
from autopar.graphs.collective_nodes import group_of
from autopar.graphs.operator_names import base_name
from autopar.layouts.placement import Mesh, local_shape
from autopar.ops.dispatch import experts_that_came, received_order, row_list
from autopar.ops.dispatched_tokens import (
    first_pairs,
    pairs_of_tokens,
    received_tokens,
    summed_rows,
    tokens_that_came,
)
from autopar.ops.symmetric_products import SYMMETRIC, gathered_products
from autopar.passes.lowering.stage import LoweredStage
from autopar.program import Program, returned_values


class AbstractTensor(NamedTuple):
    """A tensor without its values: local shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


AbstractValue: TypeAlias = "AbstractTensor | tuple[AbstractTensor | None, ...] | None"
"""Of one output or of several; None: of something else than a tensor, or unknown."""

_c10d = torch.ops._c10d_functional
_SIZES: Mapping[object, Callable[[tuple[int, ...], int], tuple[int, ...]]] = {
    _c10d.all_reduce.default: lambda shape, ranks: shape,
    _c10d.all_gather_into_tensor.default: lambda shape, ranks: (shape[0] * ranks, *shape[1:]),
    _c10d.reduce_scatter_tensor.default: lambda shape, ranks: (shape[0] // ranks, *shape[1:]),
    _c10d.broadcast.default: lambda shape, ranks: shape,
}
"""Collective -> what it makes of a local shape in a group of so many ranks."""

_aten = torch.ops.aten
KEPT_BY_DEVICE = frozenset(
    {
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Operators of which only the first output is the same on all devices; what they keep for backward is not compared."""
NOT_WITHOUT_VALUES: Mapping[object, str] = {
    _aten._grouped_mm.default: "its shape function takes bf16 alone, kernels take more",
    _aten.repeat_interleave.Tensor: "how many rows it makes follows from values",
    experts_that_came: "how many rows came follows from values",
    received_order: "how many rows came follows from values",
    row_list: "the numbers are values",
    received_tokens: "how many tokens came follows from values",
    tokens_that_came: "how many rows came follows from values",
    pairs_of_tokens: "how many tokens came follows from values",
    first_pairs: "how many tokens go follows from values",
    summed_rows: "its lengths are values",
}
"""Operators that do not run without values, though they may with them -> why."""


class CheckFailed(AssertionError):
    """A lowered graph does not hold what it says: a fault of autopar, or of a pass that was added to it."""


def check_stage(stage: LoweredStage, after: str, unchanged: Collection[str] = ()) -> None:
    """Check every graph of a stage. after: the pass that has run; unchanged: names of the graphs that it left as they
    were. Raises CheckFailed."""
    where = f"behind {after}, stage {stage.number}"
    for name, module in stage.graphs.items():
        if name not in unchanged:
            check_graph(module.graph, stage.plan.mesh, f"{where}, {name}")
    if stage.split is not None:
        _check_saved(stage, where)
    elif "program" not in unchanged:
        _check_boundary(stage.program, where)
        _check_layouts(stage, where)


def check_graph(graph: fx.Graph, mesh: Mesh, where: str) -> None:
    """Order, shapes, dtypes and groups of one graph of local shapes. Raises CheckFailed."""
    made: dict[fx.Node, AbstractValue] = {}
    for node in graph.nodes:
        late = [operand for operand in node.all_input_nodes if operand not in made]
        if late:
            raise CheckFailed(f"{where}: {node.name} reads {late[0].name}, which is not made before it")
        made[node] = said = _said(node)
        if node.op != "call_function":
            continue
        if node.target in SYMMETRIC:
            found = _in_symmetric_memory(node, mesh, where)
        else:
            found = _collective(node, made, mesh, where) if _is_collective(node) else _computed(node, made, said, where)
        if said is None:
            made[node] = found
        elif not _agree(said, found):
            raise CheckFailed(
                f"{where}: {node.name} = {node.target} says {_text(said)}, of its operands it makes {_text(found)}"
            )


def collective_order(graphs: Mapping[str, fx.GraphModule]) -> dict[str, list[str]]:
    """Group -> the collectives that a rank starts there, in order: kind, elements, dtype and the name of the graph."""
    found: dict[str, list[str]] = {}
    for name, module in graphs.items():
        for node in module.graph.nodes:
            if group_of(node) is not None:
                # blocks of a gather may be uneven, what is gathered is not: elements of the larger side are compared
                size = max(_elements(node), *map(_elements, node.all_input_nodes))
                kind, dtype = base_name(node.target), node.meta.get("dtype")
                found.setdefault(str(node.args[-1]), []).append(f"{kind} of {size} {dtype} in {name}")
    return found


def check_ranks(orders: Mapping[tuple[int, ...], Mapping[str, Sequence[str]]], mesh: Mesh) -> None:
    """orders: coordinate of a rank -> its `collective_order`. Raises CheckFailed where two ranks of a group differ."""
    for (one, mine), (two, others) in itertools.combinations(orders.items(), 2):
        for group in {*mine, *others}:
            axes = {mesh.axis_names.index(name) for name in group.split("+")}
            if any(one[axis] != two[axis] for axis in range(len(mesh.shape)) if axis not in axes):
                continue
            pairs = itertools.zip_longest(mine.get(group, ()), others.get(group, ()))
            for number, (a, b) in enumerate(pairs):
                if a != b:
                    raise CheckFailed(f"group {group}: collective {number} of rank {one} is {a}, of rank {two} {b}")


# what nodes say, and what they make


def _said(node: fx.Node) -> AbstractValue:
    shape, dtype = node.meta.get("local_shape"), node.meta.get("dtype")
    if shape is None or dtype is None:
        return None
    if isinstance(dtype, torch.dtype):
        return AbstractTensor(tuple(shape), dtype)
    return tuple(
        None if s is None or d is None else AbstractTensor(tuple(s), d) for s, d in zip(shape, dtype, strict=True)
    )


def _agree(said: AbstractValue, found: AbstractValue) -> bool:
    if said is None or found is None:
        return True
    if isinstance(said, AbstractTensor) or isinstance(found, AbstractTensor):
        return said == found
    return len(said) == len(found) and all(map(_agree, said, found))


def _elements(node: fx.Node) -> int:
    said = _said(node)
    return math.prod(said.shape) if isinstance(said, AbstractTensor) else 0


def _text(said: AbstractValue) -> str:
    if said is None or isinstance(said, AbstractTensor):
        return str(said or "no tensor")
    return f"({', '.join(map(_text, said))})"


def _is_collective(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "namespace", "") == "_c10d_functional"


def _collective(node: fx.Node, made: Mapping[fx.Node, AbstractValue], mesh: Mesh, where: str) -> AbstractValue:
    operand = node.all_input_nodes[0]  # behind it, how many rows go where, if that is known when it runs
    given = made[operand]
    if node.target is _c10d.wait_tensor.default:
        return given
    symbol, ranks = str(node.args[-1]), _ranks(node, mesh, where)
    sizes = [arg for arg in node.args[1:-1] if isinstance(arg, int)]
    if node.target is not _c10d.broadcast.default and sizes and sizes != [ranks]:
        raise CheckFailed(f"{where}: {node.name} says that {symbol!r} has {sizes[0]} ranks, it has {ranks}")
    rule = _SIZES.get(node.target)
    if not isinstance(given, AbstractTensor) or rule is None:
        return None
    return AbstractTensor(rule(given.shape, ranks), given.dtype)


def _ranks(node: fx.Node, mesh: Mesh, where: str) -> int:
    """Of the group that a node names."""
    symbol = str(node.args[-1])
    names = symbol.split("+")
    if not set(names) <= set(mesh.axis_names) or names != sorted(names, key=mesh.axis_names.index):
        raise CheckFailed(f"{where}: {node.name} runs on {symbol!r}, which are no axes of {mesh} in its order")
    return math.prod(mesh.shape[mesh.axis_names.index(name)] for name in names)


def _in_symmetric_memory(node: fx.Node, mesh: Mesh, where: str) -> AbstractValue:
    """What a product makes with its collective, by its arguments and the ranks of its group."""
    ranks, dtype = _ranks(node, mesh, where), node.all_input_nodes[0].meta["dtype"]
    arguments: tuple[Any, ...] = node.args
    lead, _, keeps = arguments[2:5]
    shape, *others = (operand.meta["local_shape"] for operand in node.all_input_nodes)
    if math.prod(lead) != shape[0] or any(operand.meta["dtype"] != dtype for operand in node.all_input_nodes):
        raise CheckFailed(f"{where}: {node.name} reads {shape} {dtype} as {lead} rows, or weights of another dtype")
    columns = [other[1] for other in others] + ([shape[1]] if keeps is True else [])
    if node.target is gathered_products:
        return tuple(AbstractTensor((ranks * shape[0], width), dtype) for width in columns)
    return AbstractTensor((shape[0] // ranks, columns[0]), dtype)


def _computed(node: fx.Node, made: Mapping[fx.Node, AbstractValue], said: AbstractValue, where: str) -> AbstractValue:
    """Local shapes and dtypes of what a call makes of its operands; None where that cannot be known without values."""
    if any(made[operand] is None for operand in node.all_input_nodes) or node.target in NOT_WITHOUT_VALUES:
        return None
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        several = made[source]
        return None if several is None or isinstance(several, AbstractTensor) else several[index]
    args, kwargs = _frozen(node.args, made), _frozen(node.kwargs, made)
    try:
        found = _run(node.target, args, kwargs)
        if node.target in KEPT_BY_DEVICE and found is not None and not isinstance(found, AbstractTensor):
            return found[0], *(None for _ in found[1:])
        return found if _agree(said, found) else _run_on_cpu(node.target, args, kwargs)
    except NotImplementedError:
        return None  # torch's word for an operator that has no shapes without values
    except Exception as error:
        raise CheckFailed(f"{where}: {node.name} = {node.target} does not run on its operands: {error}") from error


class _Given(tuple[Any, ...]):
    """What a node says, among frozen arguments."""


class _Pairs(tuple[Any, ...]):
    """A frozen dict."""


def _frozen(value: Any, made: Mapping[fx.Node, AbstractValue]) -> Any:
    """Arguments as a key: nodes as what they say."""
    if isinstance(value, fx.Node):
        return _Given((made[value],))
    if isinstance(value, dict | immutable_dict):
        return _Pairs((key, _frozen(one, made)) for key, one in value.items())
    if isinstance(value, list | tuple | immutable_list):
        return tuple(_frozen(one, made) for one in value)
    return (type(value).__name__, value) if isinstance(value, bool | int | float) else value


@functools.lru_cache(maxsize=100_000)
def _run(target: Callable[..., Any], args: Any, kwargs: Any) -> AbstractValue:
    """Equal calls are run once, on the meta device: no values, and a fifth of a fake tensor's time."""
    given = {key: "meta" if key == "device" else _thawed(value) for key, value in kwargs}
    return _abstract(target(*_thawed(args), **given))


@functools.lru_cache(maxsize=10_000)
def _run_on_cpu(target: Callable[..., Any], args: Any, kwargs: Any) -> AbstractValue:
    """On fake CPU tensors, as captured programs are: layer norms of bf16 have statistics of bf16 only there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return _abstract(target(*_thawed(args, "cpu"), **{key: _thawed(value, "cpu") for key, value in kwargs}))


def _thawed(value: Any, device: str = "meta") -> Any:
    if isinstance(value, _Given):
        return _tensors(value[0], device)
    if isinstance(value, _Pairs):
        return {key: _thawed(one, device) for key, one in value}
    if isinstance(value, tuple):
        if len(value) == 2 and value[0] in ("bool", "int", "float"):
            return value[1]
        return [_thawed(one, device) for one in value]
    return value


def _tensors(said: AbstractValue, device: str) -> Any:
    if said is None:
        return None
    if isinstance(said, AbstractTensor):
        return torch.empty(said.shape, dtype=said.dtype, device=device)
    return tuple(_tensors(one, device) for one in said)


def _abstract(value: Any) -> AbstractValue:
    if isinstance(value, torch.Tensor):
        return AbstractTensor(tuple(value.shape), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(
            AbstractTensor(tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else None for one in value
        )
    return None


# a stage as a whole


def _check_boundary(program: Program, where: str) -> None:
    """Inputs have the shapes that the program says, gradients the blocks of their parameters."""
    blocks = {}
    for node, meaning in zip(program.placeholders, program.inputs, strict=True):
        if meaning.role == "parameter":
            blocks[meaning.name] = meaning.shape
        if not _agree(_said(node), AbstractTensor(tuple(meaning.shape), meaning.dtype)):
            raise CheckFailed(f"{where}: the input {meaning.name} is {_text(_said(node))}, the program says {meaning}")
    for node, output in zip(program.returned, program.outputs, strict=True):
        block = blocks.get(output.name)
        if output.role != "gradient" or block is None or not isinstance(node, fx.Node):
            continue
        said = _said(node)
        if isinstance(said, AbstractTensor) and said.shape != tuple(block):
            raise CheckFailed(f"{where}: the gradient of {output.name} is {_text(said)}, its parameter {block}")


def _check_layouts(stage: LoweredStage, where: str) -> None:
    """What an operator makes is the block of the layout that the plan says."""
    plan = stage.plan
    coordinate = plan.mesh.coordinate(stage.context.rank)
    for node in stage.program.graph.nodes:
        if "layout" not in node.meta:
            continue
        layout, shape, index = node.meta["layout"], node.meta["global_shape"], node.meta["output"]
        entry = plan.operators.get(str(node.meta.get("operator")))
        if entry is not None and entry.outputs[index] != layout:
            raise CheckFailed(f"{where}: {node.name} lies as {layout}, the plan says {entry.outputs[index]}")
        said, block = _said(node), local_shape(shape, layout, plan.mesh, coordinate)
        if isinstance(said, AbstractTensor) and said.shape != block:
            raise CheckFailed(f"{where}: {node.name} is {_text(said)}; as {layout}, {shape} has the block {block}")


def _check_saved(stage: LoweredStage, where: str) -> None:
    """Forward returns last what backward takes first, and says the same of it; nothing of it is to be recomputed."""
    parts = stage.partition
    again = stage.plan.recomputed
    made = {node.name: node for node in stage.program.graph.nodes}
    for saved in parts.saved:
        node = made[saved.name]
        if node.op == "call_function" and str(node.meta.get("operator")) in again and "redistributes" not in node.meta:
            raise CheckFailed(f"{where}: {saved.name} is saved, but the plan recomputes {node.meta['operator']}")
    if parts.backward is None or not parts.saved:
        return
    given = returned_values(parts.forward.graph)[-len(parts.saved) :]
    taken = list(parts.backward.graph.find_nodes(op="placeholder"))[: len(parts.saved)]
    for left, right in zip(given, taken, strict=True):
        if not _agree(_said(left), _said(right)):
            raise CheckFailed(
                f"{where}: forward saves {left.name} as {_text(_said(left))}, backward takes {right.name} as "
                f"{_text(_said(right))}"
            )
