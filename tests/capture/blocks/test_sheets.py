"""Rows of four members become the rows of all, with operands, glue and salts where a whole list would have them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autopar.capture.blocks.sheets import Extension, Operand, Row, Salt, UnprovenError


def chain(members: Sequence[int], *, wrong: int | None = None) -> list[Row]:
    """A forward up and a backward pass down through `members`: each takes from its neighbour, the backward pass also
    from its own forward; a row of glue stands behind each forward row. `wrong`: the one that takes from the start."""
    rows = [Row("start", ())]
    forward: dict[int, int] = {}
    last = 0
    for at, member in enumerate(members):
        rows.append(Row("forward", (Operand(0 if at == wrong else last), Salt("calls", 1 + at)), member, "forward"))
        rows.append(Row("glue", (Operand(len(rows) - 1), Operand(0))))
        forward[at] = last = len(rows) - 1
    rows.append(Row("loss", (Operand(last), Salt("calls", 1 + len(members)))))
    last = len(rows) - 1
    for at, member in reversed(list(enumerate(members))):
        rows.append(Row("backward", (Operand(last), Operand(forward[at])), member, "backward"))
        last = len(rows) - 1
    return [*rows, Row("end", (Operand(last),))]


@pytest.mark.parametrize("count", [4, 5, 9])
def test_the_extension_is_the_list_of_all_members(count: int) -> None:
    found = Extension(chain(range(4)), count).placed
    expected = chain(range(count))
    assert [(placed.row.what, placed.row.leaves) for placed in found] == [(row.what, row.leaves) for row in expected]


def test_a_third_member_that_takes_from_elsewhere_is_no_rule() -> None:
    with pytest.raises(UnprovenError, match="takes rows"):
        Extension(chain(range(4), wrong=2), 9)


def test_members_out_of_order_are_no_sweep() -> None:
    with pytest.raises(UnprovenError, match="follow each other"):
        Extension(chain([0, 2, 1, 3]), 9)


def test_what_reads_the_second_member_alone_is_refused() -> None:
    rows = chain(range(4))
    rows.append(Row("reader", (Operand(3),)))
    with pytest.raises(UnprovenError, match="outside takes a value of member 1"):
        _ = Extension(rows, 9).placed
