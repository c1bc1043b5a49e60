"""Segments: the parts into which the time of a step is cut when memory is counted, in forward order.

    model.layers.0, model.layers.1, ...    one segment per block (`repeated_blocks.py`)
    what lies between the blocks           one segment per gap: the embedding, the final norm with the loss

Forward passes the segments upwards and backward downwards, so a value that is saved in segment 3 and read by the
backward of segment 3 lives while backward is still at segment 3 or above.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.passes.module_segments import block_path, segment_of
from autopar.planner.problem.graph_operators import operators
from autopar.program import Program


@dataclass(frozen=True, slots=True)
class Segments:
    """names: the block of every segment, "" for a gap. by_path: module path -> its segment, where it has only one."""

    names: tuple[str, ...]
    by_path: Mapping[str, int]

    @property
    def last(self) -> int:
        """The number of the last segment."""
        return len(self.names) - 1

    def of(self, name: str) -> int | None:
        """Segment of an operator, parameter or module path, None where the name alone does not tell."""
        block = block_path(name)
        return self.by_path.get(block if block is not None else _module(name))

    def joined(self, starts: Sequence[int]) -> Segments:
        """Spans of neighbours as one segment each. starts: the first of every span."""
        ends = (*starts[1:], len(self.names))
        names = tuple(
            self.names[first] if end == first + 1 else f"{self.names[first]} .. {self.names[end - 1]}"
            for first, end in zip(starts, ends, strict=True)
        )
        return Segments(names, {path: span_of(starts, number) for path, number in self.by_path.items()})

    def along(self, names: Iterable[tuple[str, str]]) -> Iterator[int]:
        """Segments of (phase, name) in program order; one that its name does not tell lies where its neighbour in
        front of it lies, and backward begins in the last segment."""
        current, before = 0, "forward"
        for phase, name in names:
            if phase != before:
                current, before = self.last, phase
            found = self.of(name)
            current = current if found is None else found
            yield current


def span_of(starts: Sequence[int], segment: int) -> int:
    """The number of the span in which a segment lies, of spans that begin at `starts`."""
    return bisect_right(starts, segment) - 1


def module_segments(program: Program) -> Segments:
    """As `find_segments`; a model without blocks has one segment per outermost module instead, and gaps."""
    found = find_segments(program)
    return found if any(found.names) else find_segments(program, _outermost)


def _outermost(name: str) -> str | None:
    return segment_of(name) or None


def find_segments(program: Program, part_of: Callable[[str], str | None] = block_path) -> Segments:
    """Blocks and gaps in the order in which forward meets them. part_of: the block of an operator, if any."""
    names: list[str] = []
    known: dict[str, int] = {}
    paths: dict[str, set[int]] = {}
    for node in operators(program):
        if node.meta["phase"] == "backward":
            continue
        name = str(node.meta["operator"])
        block = part_of(name)
        if block is None and (not names or names[-1]):
            names.append("")
        elif block is not None and block not in known:
            known[block] = len(names)
            names.append(block)
        segment = len(names) - 1 if block is None else known[block]
        paths.setdefault(block_path(name) or _module(name), set()).add(segment)
    return Segments(tuple(names) or ("",), {path: min(found) for path, found in paths.items() if len(found) == 1})


def _module(name: str) -> str:
    """The module path of an operator ("model.norm/mul#0") or of a parameter ("model.norm.weight")."""
    return name.split("/")[0] if "/" in name else name.rpartition(".")[0]
