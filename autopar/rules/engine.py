"""The engine: which rule a node of a captured graph has.

    rule_for(node)  ->  Rule, or None: the operator has no rule and appears in `uncovered`

Rules come from the tables, from `register_rule`, or, for operators that torch tags as pointwise, from `POINTWISE`; a
call that has none of these has the one that was discovered for it, if any (`learning`). A rule depends on shapes and
attributes only and is derived once per distinct call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopar.ops.constant import constant
from autopar.program import Program
from autopar.rules.binding import bind_rule
from autopar.rules.call import Call, TensorSpec, call_of, tensor_operands
from autopar.rules.rule import Rule
from autopar.rules.table import POINTWISE, RULES
from autopar.rules.table_attention import ATTENTION_RULES, NATIVE_ATTENTION_RULES
from autopar.rules.table_experts import EXPERT_RULES
from autopar.rules.table_functions import RULE_FUNCTIONS
from autopar.rules.table_index import INDEX_RULES
from autopar.rules.table_norms import NORM_RULES
from autopar.rules.table_pooling import POOLING_RULES
from autopar.rules.table_recurrent import RECURRENT_RULES
from autopar.rules.table_shifts import SHIFT_RULES
from autopar.rules.table_spatial import SPATIAL_RULES
from autopar.rules.table_statistics import STATISTICS_RULES

__all__ = ["is_view", "rule_for", "tensor_operands", "uncovered"]

_aten = torch.ops.aten
RESHAPES = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
    }
)
"""Calls that see a tensor in other dims, in the order of its elements."""
_RESHAPING = RESHAPES | {_aten.permute.default}
_CONSTANT = "-> [...]"
_VIEWS_OF_EQUAL_SHAPE = frozenset({_aten.slice.Tensor, _aten.expand.default})

TABLE: Mapping[str, str | Callable[[Call], str | None]] = MappingProxyType(
    {
        **RULES,
        **RULE_FUNCTIONS,
        **INDEX_RULES,
        **NORM_RULES,
        **RECURRENT_RULES,
        **SHIFT_RULES,
        **SPATIAL_RULES,
        **STATISTICS_RULES,
        **POOLING_RULES,
        **EXPERT_RULES,
        **ATTENTION_RULES,
        **NATIVE_ATTENTION_RULES,
    }
)


_REGISTERED: dict[str, str] = {}  # rules of users, by full operator name; filled by `register_rule` only


def add_rule(name: str, text: str) -> None:
    """Give the operator with the full name `name` ("lib.op.default") a rule that has been proven."""
    _REGISTERED[name] = text
    rule_of.cache_clear()


_DISCOVERED: dict[str, str | None] = {}  # by `Call.text`; None: none was found. Filled by `take_rules` only


def take_rules(found: Mapping[str, str | None]) -> None:
    """Take rules that were discovered and proven for calls, by `Call.text`."""
    _DISCOVERED.update(found)
    rule_of.cache_clear()


def discovered_rules(program: Program) -> dict[str, str | None]:
    """`Call.text` -> what was discovered, for calls of the program that have no other rule; never tried: absent."""
    if not _DISCOVERED:
        return {}
    return {text: _DISCOVERED[text] for text in sorted(undescribed(program)) if text in _DISCOVERED}


def registered_rules(program: Program) -> dict[str, str]:
    """Operator -> rule of those operators of the program whose rule comes from a user."""
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    return {name: text for name, text in sorted(_REGISTERED.items()) if name in names}


def is_view(node: fx.Node) -> bool:
    """Whether the node only renames dims: reshapes, permutations, full-range slices, expands that do nothing."""
    if node.target in _RESHAPING:
        return True
    if node.target not in _VIEWS_OF_EQUAL_SHAPE:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return _shape(source) == _shape(node)


def _shape(node: fx.Node) -> tuple[int, ...]:
    """That of the program, or the local one in the graphs of a rank."""
    return tuple(node.meta["val"].shape if "val" in node.meta else node.meta["local_shape"])


def rule_for(node: fx.Node) -> Rule | None:
    """The rule of a call_function node; None if there is none, and for getitem and views, which carry no decision."""
    if node.op != "call_function" or node.target is operator.getitem or is_view(node):
        return None
    return rule_of(call_of(node))


@cache
def rule_of(call: Call) -> Rule | None:
    """The rule of one call; None if the operator has none."""
    text = rule_text(call)
    return None if text is None else bind_rule(text, call)


def rule_text(call: Call) -> str | None:
    """The string from which the rule of `call` is made."""
    text = _described_text(call)
    return _DISCOVERED.get(call.text) if text is None and _DISCOVERED else text


def _described_text(call: Call) -> str | None:
    """What a user or the table says of `call`."""
    entry = table_entry(call.target)
    return entry(call) if callable(entry) else entry


def table_entry(target: Any) -> str | Callable[[Call], str | None] | None:
    """The entry of an operator: the user's, else that of the table, else `POINTWISE` for those that torch tags so."""
    if str(target) in _REGISTERED:
        return _REGISTERED[str(target)]
    if target is constant:
        return _CONSTANT
    key = table_key(target)
    if key is not None:
        return TABLE[key]
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        return POINTWISE
    return None


def described_rule(target: Any) -> str | None:
    """The rule of an operator, to read: its string, or what the function says that writes it; None without one."""
    entry = table_entry(target)
    return f"depends on its arguments: {entry.__doc__ or entry.__name__}" if callable(entry) else entry


def table_key(target: Any) -> str | None:
    """The key of an operator in the table: its full name, or its name without overload; None if it has no entry."""
    name = str(target)
    return next((key for key in (name, name.rpartition(".")[0]) if key in TABLE), None)


def uncovered(program: Program) -> dict[str, fx.Node]:
    """Operator name -> node of every operator with a tensor output that has no rule."""
    return {node.meta["operator"]: node for node in _deciding(program) if rule_for(node) is None}


def undescribed(program: Program) -> dict[str, Call]:
    """`Call.text` -> call with a tensor output for which neither a user nor the table has a rule."""
    calls = set(map(call_of, _deciding(program)))
    return {call.text: call for call in calls if _described_text(call) is None}


def _deciding(program: Program) -> Iterator[fx.Node]:
    """Nodes that carry a decision: calls with a tensor output that are no views."""
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or is_view(node):
            continue
        if any(isinstance(output, TensorSpec) for output in call_of(node).outputs):
            yield node
