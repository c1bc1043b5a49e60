"""A list of operators in which equal members stand in segments, extended to more members.

    members 0 1 2 3 traced, 0 .. 31 wanted:    A f0 f1 f2 f3 B b3 b2 b1 b0 C
                                         -->   A f0 f1 f2 f2' ... f3 B b3 b2' ... b2 b1 b0 C

A `Row` is an operator with its operands as positions, `member` says which traced member it belongs to. Where the rows
of members 0 to 3 follow each other, up or down, is a sweep: one of parameters, one of the forward, one of the backward
pass. Members 1 and 2 are compared row by row; each operand is the same row in both, the same place in the own member,
or the same place in the member before or behind. That is the rule by which the others are made. A number that differs
is the next of a counter (`Salt`). What does not fit raises `UnprovenError`: then the whole model is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from autopar.capture.blocks.equal_members import TRACED

LAST = TRACED - 1


class UnprovenError(Exception):
    """Why what stands for a whole model is not known to be equal to it."""


@dataclass(frozen=True, slots=True)
class Operand:
    """The row at `position`."""

    position: int


@dataclass(frozen=True, slots=True)
class Salt:
    """The number `value` from a counter of draws."""

    counter: str
    value: int


@dataclass(frozen=True, slots=True)
class Row:
    """An operator. what: all of it but its operands; leaves: operands, salts and constants; member: of the traced ones;
    kind: rows of one kind and of neighbouring members make a sweep; source: what it was made of, for the reader."""

    what: Hashable
    leaves: tuple[Any, ...]
    member: int | None = None
    kind: str = ""
    source: Any = None

    def of_member(self, member: int | None) -> Row:
        """The row, said to belong to a traced member or to none."""
        return replace(self, member=member)


@dataclass(frozen=True, slots=True)
class Placed:
    """A row of the extended list: `row` with operands as positions there, made of the row at `template`. member: index
    in the whole run where it is one of those between the first and the last, else None."""

    row: Row
    template: int
    member: int | None


Place: TypeAlias = tuple[int, int, int]
"""(sweep, member, offset in the member)"""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Rows of members 0 to 3 in this or in the opposite order. segments: member -> (start, stop)."""

    rising: bool
    segments: tuple[tuple[int, int], ...]

    @property
    def inner(self) -> tuple[int, int]:
        """Positions from the first to behind the last row of members 1 and 2."""
        return min(self.segments[1][0], self.segments[2][0]), max(self.segments[1][1], self.segments[2][1])


def find_sweeps(rows: Sequence[Row]) -> list[Sweep]:
    """The sweeps, in order. A row of no member inside of one belongs to the member before it."""
    runs: list[tuple[str, int, int, int]] = []
    for position, row in enumerate(rows):
        if row.member is None:
            continue
        if runs and runs[-1][:2] == (row.kind, row.member):
            runs[-1] = (*runs[-1][:3], position + 1)
        else:
            runs.append((row.kind, row.member, position, position + 1))
    starts = [*(start for _, _, start, _ in runs), len(rows)]
    return [
        _sweep(runs[at : at + TRACED], starts[min(at + TRACED, len(runs))]) for at in range(0, len(runs), TRACED)
    ]


def _sweep(runs: Sequence[tuple[str, int, int, int]], end: int) -> Sweep:
    """The sweep of four runs of rows. The last member ends before `end`, with its last row or as long as the others."""
    members = [member for _, member, _, _ in runs]
    kinds = {kind for kind, *_ in runs}
    if members not in ([0, 1, 2, 3], [3, 2, 1, 0]) or len(kinds) != 1:
        raise UnprovenError(f"members follow each other as {members} ({', '.join(sorted(kinds))})")
    starts = [start for _, _, start, _ in runs]
    stop = min(end, max(runs[-1][3], starts[3] + starts[2] - starts[1]))
    segments = dict(zip(members, zip(starts, [*starts[1:], stop], strict=True), strict=True))
    if len({stop - start for start, stop in (segments[1], segments[2])}) != 1:
        raise UnprovenError(f"the second and the third member have segments {segments[1]} and {segments[2]}")
    return Sweep(members[0] == 0, tuple(segments[member] for member in range(TRACED)))


@dataclass(frozen=True, slots=True)
class _Fixed:
    position: int


@dataclass(frozen=True, slots=True)
class _Near:
    """The place in the member `step` further: of the traced ones at `first` as seen from member 1, `second` from 2."""

    sweep: int
    step: int
    first: int
    second: int


class Extension:
    """The rows of a run of `count` members, from those of the traced ones."""

    def __init__(self, rows: Sequence[Row], count: int) -> None:
        self._rows, self._count = rows, count
        self.sweeps = find_sweeps(rows)
        if not self.sweeps:
            raise UnprovenError("no operator belongs to a member")
        self._places: dict[int, Place] = {
            position: (index, member, position - start)
            for index, sweep in enumerate(self.sweeps)
            for member, (start, stop) in enumerate(sweep.segments)
            for position in range(start, stop)
        }
        self._strides: dict[str, int] = {}
        self._salts: dict[str, tuple[int, int]] = {}
        """Of each counter, the least and the largest number that member 1 took."""
        self._rules = [self._rules_of(sweep) for sweep in self.sweeps]
        self._order = list(self._ordered())
        self._new = {key: position for position, (key, _) in enumerate(self._order)}

    @functools.cached_property
    def placed(self) -> list[Placed]:
        """All rows of the whole run, in order."""
        return [self._made(key, template) for key, template in self._order]

    def new_position(self, position: int) -> int:
        """Where a row that is no inner member's has gone."""
        return self._new[position]

    def inner(self, sweep: int) -> list[tuple[int, range]]:
        """(traced member that is the template, new positions) of each inner member, in order."""
        start, _ = self.sweeps[sweep].segments[1]
        length = self.sweeps[sweep].segments[1][1] - start
        found = []
        for member in self._inner_members(self.sweeps[sweep]):
            first = self._new[sweep, member, 0]
            found.append((_template(member), range(first, first + length)))
        return found

    # the rule

    def _rules_of(self, sweep: Sweep) -> list[list[Any]]:
        (start, stop), (other, _) = sweep.segments[1], sweep.segments[2]
        return [self._rule(self._rows[start + at], self._rows[other + at]) for at in range(stop - start)]

    def _rule(self, one: Row, two: Row) -> list[Any]:
        if one.what != two.what or len(one.leaves) != len(two.leaves) or (one.member is None) != (two.member is None):
            raise UnprovenError(f"the second member does {_shown(one)}, the third {_shown(two)}")
        return [self._leaf(a, b, one) for a, b in zip(one.leaves, two.leaves, strict=True)]

    def _leaf(self, a: Any, b: Any, row: Row) -> Any:
        if isinstance(a, Operand) and isinstance(b, Operand):
            return self._operand(a.position, b.position, row)
        if isinstance(a, Salt) and isinstance(b, Salt) and a.counter == b.counter:
            stride = self._strides.setdefault(a.counter, b.value - a.value)
            least, most = self._salts.get(a.counter, (a.value, a.value))
            least, most = self._salts[a.counter] = min(a.value, least), max(a.value, most)
            if stride == b.value - a.value > most - least:
                return a
        elif type(a) is type(b) and repr(a) == repr(b):
            return a
        raise UnprovenError(f"{_shown(row)} has {a} in the second member and {b} in the third")

    def _operand(self, a: int, b: int, row: Row) -> Any:
        one, two = self._places.get(a), self._places.get(b)
        if a == b and (one is None or one[1] in (0, LAST)):
            return _Fixed(a)
        if one is not None and two is not None and one[0] == two[0]:
            steps = (one[1] - 1, two[1] - 2)
            inner = [place[2] for place in (one, two) if place[1] in (1, 2)]
            if steps[0] == steps[1] in (-1, 0, 1) and (steps[0] or len({*inner}) == 1):
                return _Near(one[0], steps[0], one[2], two[2])
        raise UnprovenError(f"{_shown(row)} takes rows {a} and {b} in the second and third member")

    # the rows of all members

    def _inner_members(self, sweep: Sweep) -> range:
        return range(1, self._count - 1) if sweep.rising else range(self._count - 2, 0, -1)

    def _ordered(self) -> Iterator[tuple[Any, int]]:
        """(key of a new row, position of its template): a place for those of inner members, else the old position."""
        position = 0
        for index, sweep in enumerate(self.sweeps):
            start, stop = sweep.inner
            yield from ((at, at) for at in range(position, start))
            length = sweep.segments[1][1] - sweep.segments[1][0]
            for member in self._inner_members(sweep):
                first = sweep.segments[_template(member)][0]
                yield from (((index, member, at), first + at) for at in range(length))
            position = stop
        yield from ((at, at) for at in range(position, len(self._rows)))

    def _made(self, key: Any, template: int) -> Placed:
        row = self._rows[template]
        if isinstance(key, int):
            place = self._places.get(key)
            member = None if place is None else place[1]
            leaves = tuple(self._kept_leaf(leaf, row, member) for leaf in row.leaves)
            return Placed(replace(row, leaves=leaves), template, None)
        sweep, member, offset = key
        rules = self._rules[sweep][offset]
        return Placed(replace(row, leaves=tuple(self._ruled(rule, member) for rule in rules)), template, member)

    def _ruled(self, rule: Any, member: int) -> Any:
        if isinstance(rule, _Fixed):
            return Operand(self._new[rule.position])
        if isinstance(rule, Salt):
            return Salt(rule.counter, rule.value + (member - 1) * self._strides[rule.counter])
        if not isinstance(rule, _Near):
            return rule
        target = member + rule.step
        if target == 0:
            return Operand(self._new[self.sweeps[rule.sweep].segments[0][0] + rule.first])
        if target == self._count - 1:
            return Operand(self._new[self.sweeps[rule.sweep].segments[LAST][0] + rule.second])
        return Operand(self._new[rule.sweep, target, rule.first if rule.step >= 0 else rule.second])

    def _kept_leaf(self, leaf: Any, row: Row, member: int | None) -> Any:
        """An operand or salt of a row outside of the inner members: what is said of member 2 holds of the last but one,
        what is said of member 1 only by the first."""
        if isinstance(leaf, Salt):
            return self._kept_salt(leaf, row)
        if not isinstance(leaf, Operand):
            return leaf
        sweep, near, offset = self._places.get(leaf.position, (0, 0, 0))
        if near not in (1, 2):
            return Operand(self._new[leaf.position])
        if (near == 1) != (member == 0) or (near == 2 and not self.sweeps[sweep].rising):
            raise UnprovenError(f"{_shown(row)} outside takes a value of member {near}")
        return Operand(self._new[sweep, 1 if near == 1 else self._count - 2, offset])

    def _kept_salt(self, salt: Salt, row: Row) -> Salt:
        stride = self._strides.get(salt.counter)
        if stride is None or salt.value < self._salts[salt.counter][0]:
            return salt
        if salt.value < self._salts[salt.counter][0] + 2 * stride:
            raise UnprovenError(f"{_shown(row)} outside draws with a number of a member")
        return Salt(salt.counter, salt.value + (self._count - TRACED) * stride)


def _template(member: int) -> int:
    return 1 if member == 1 else 2


def _shown(row: Row) -> str:
    what = row.what[0] if isinstance(row.what, tuple) else row.what
    return str(what)
