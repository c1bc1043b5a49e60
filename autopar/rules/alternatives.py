"""Operator alternatives: the ways to run an operator beside the operator itself.

    aten.mm     default                 the product as it was captured
                fp8_rowwise             autopar::mm_fp8_rowwise(a, b)
                fp8_tensorwise          autopar::mm_fp8_tensorwise(a, b)
    autopar::attention
                default                 keys and values whole
                ring                    autopar::ring_attention(...): blocks of keys and values go around the ranks

An alternative is another operator that takes the same arguments and makes the same outputs. By its own name it has a
rule (`table_*.py`), a price (`cost_models`), a kernel (`runtime/kernels`) and a proof by execution, so nothing else has
to know it: the planner holds it as further labels beside the layouts, `OperatorPlan.implementation` names the one that
was chosen, and the lowering calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from autopar.ops.float8 import DTYPE, MULTIPLE, mm_fp8_rowwise, mm_fp8_tensorwise
from autopar.ops.ring_attention import ring_attention, ring_attention_backward
from autopar.plans.plan_value import DEFAULT_IMPLEMENTATION, RING
from autopar.rules.call import Call, call_of
from autopar.rules.engine import rule_for, rule_of, table_key
from autopar.rules.rule import Rule

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One more way to run an operator. target: the operator that is called; takes: whether it can stand for a call;
    fits: whether it computes blocks of these shapes of its tensor operands as they are (None: any, and of unequal
    sizes); precision: the `precision=` that offers it, other than by its name, as its values differ (None: it is always
    offered); unit: the dtype for which a GPU must have units; splits: the name of its rule for whose split it is there,
    as it is the operator itself without one."""

    name: str
    target: Any
    takes: Callable[[Call], bool]
    says: str
    fits: Callable[[Sequence[Shape]], bool] | None = None
    precision: str | None = None
    unit: str | None = None
    splits: str | None = None


def _is_bf16(call: Call) -> bool:
    return all(operand.dtype == torch.bfloat16 for operand in call.operands)


def _needs_no_zeros(shapes: Sequence[Shape]) -> bool:
    """Others are padded with zeros, and the result is copied."""
    return all(size % MULTIPLE == 0 for size in shapes[1])


_FLOAT8 = str(DTYPE).removeprefix("torch.")


def _in_float8(name: str, product: Any, scales: str) -> Alternative:
    return Alternative(
        name=name,
        target=product._opoverload,
        takes=_is_bf16,
        fits=_needs_no_zeros,
        precision="fp8",
        unit=_FLOAT8,
        says=f"operands in float8 with {scales}, sums in fp32",
    )


def _has_one_sequence(call: Call) -> bool:
    """Whether queries and keys have one length."""
    queries, keys = (operand.shape for operand in (call.argument("query"), call.argument("key")))
    return bool(queries[-2] == keys[-2] > 1)


def _ring(target: Any) -> Alternative:
    return Alternative(
        name=RING,
        target=target._opoverload,
        takes=_has_one_sequence,
        splits="s",
        says="blocks of keys and values go from rank to rank of an axis that splits the sequence",
    )


ALTERNATIVES: Mapping[str, tuple[Alternative, ...]] = {
    "aten.mm": (
        _in_float8("fp8_rowwise", mm_fp8_rowwise, "a scale per row and column"),
        _in_float8("fp8_tensorwise", mm_fp8_tensorwise, "one scale each"),
    ),
    "autopar.attention": (_ring(ring_attention),),
    "autopar.attention_backward": (_ring(ring_attention_backward),),
}
"""By the operator that is captured, named as in the table of rules."""


def alternatives_of(node: fx.Node) -> tuple[Alternative, ...]:
    """The alternatives that can stand for the call of a node, whatever was asked."""
    listed = alternatives_for(node.target)
    if not listed:
        return ()
    call = call_of(node)
    return tuple(way for way in listed if way.takes(call))


def alternatives_offered(precision: str | None) -> frozenset[str]:
    """Names of the alternatives that a search under a precision may choose."""
    ways = (way for ways in ALTERNATIVES.values() for way in ways)
    return frozenset(way.name for way in ways if way.precision in (None, precision))


def alternatives_for(target: object) -> tuple[Alternative, ...]:
    """The alternatives that an operator has for some calls."""
    key = table_key(target)
    return ALTERNATIVES.get(key, ()) if key is not None else ()


def target_as(node: fx.Node, implementation: str) -> Any:
    """The operator that a node calls under an implementation. Raises KeyError for one that it does not have."""
    if implementation == DEFAULT_IMPLEMENTATION:
        return node.target
    for way in alternatives_of(node):
        if way.name == implementation:
            return way.target
    raise KeyError(implementation)


def rule_as(node: fx.Node, implementation: str) -> Rule | None:
    """The rule of a node under an implementation. Raises KeyError for one that it does not have."""
    if implementation == DEFAULT_IMPLEMENTATION:
        return rule_for(node)
    return rule_of(replace(call_of(node), target=target_as(node, implementation)))
