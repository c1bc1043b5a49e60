"""The table: most operators have one string, and every string can be read."""

from __future__ import annotations

import torch

from autopar.rules.engine import TABLE, table_key
from autopar.rules.language import parse_pattern


def pointwise_operators() -> set[str]:
    """Operators without an entry whose rule is the one string for all that torch tags as pointwise."""
    names = set()
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        packet = getattr(torch.ops.aten, name.partition(".")[0], None) if namespace == "aten" else None
        operator = getattr(packet, name.partition(".")[2] or "default", None)
        if operator is None or operator._schema.is_mutable or any(a.is_out for a in operator._schema.arguments):
            continue
        if torch.Tag.pointwise in operator.tags and table_key(operator) is None:
            names.add(name.partition(".")[0])
    return names


def test_more_than_five_of_six_operators_have_one_string() -> None:
    functions = [key for key, entry in TABLE.items() if callable(entry)]
    pointwise = pointwise_operators()
    total = len(TABLE) + len(pointwise)
    assert len(pointwise) > 100
    assert len(functions) <= total / 6, f"{len(functions)} functions for {total} operators: {functions}"


def test_every_string_can_be_read() -> None:
    for key, entry in TABLE.items():
        if isinstance(entry, str):
            assert parse_pattern(entry).text == entry, key
