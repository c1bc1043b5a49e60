"""Runs: the pieces into which a program may be cut, in forward order; a stage is some neighbouring ones.

    embedding | layers.0 | layers.1 | head        four runs, three borders

A run is a block or what lies between two blocks (`time_segments.py`). Where operators of two of them alternate in the
program there is no border between them, and they are one run.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.planner.memory.lifetimes import Lifetimes

THROUGH = " .. "
"""Between the names of the first and the last of neighbouring runs."""


@dataclass(frozen=True, slots=True)
class Runs:
    """names: of every run. of_segment: segment -> run. last_operators: the operator that ends every run."""

    names: tuple[str, ...]
    of_segment: tuple[int, ...]
    last_operators: tuple[str, ...]

    def of(self, lifetimes: Lifetimes, node: fx.Node) -> int:
        """The run of an operator of either phase."""
        return self.of_segment[lifetimes.segment[node]]


def find_runs(lifetimes: Lifetimes) -> Runs:
    """The runs of a program, from where its operators stand."""
    forward = [node for node in lifetimes.in_order if node.meta["phase"] != "backward"]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in forward:
        segment = lifetimes.segment[node]
        first.setdefault(segment, lifetimes.position[node])
        last[segment] = lifetimes.position[node]
    names, of_segment, ends = list[list[str]](), list[int](), list[int]()
    for segment in range(len(lifetimes.segments.names)):
        begin = first.get(segment)
        if not ends or (begin is not None and begin > ends[-1]):
            names.append([])
            ends.append(-1)
        ends[-1] = max(ends[-1], last.get(segment, -1))
        names[-1].append(lifetimes.segments.names[segment] or _gap_name(forward, lifetimes, segment))
        of_segment.append(len(names) - 1)
    return Runs(
        tuple(" + ".join(found) for found in names),
        tuple(of_segment),
        tuple(str(lifetimes.in_order[end].meta["operator"]) for end in ends),
    )


def _gap_name(forward: list[fx.Node], lifetimes: Lifetimes, segment: int) -> str:
    """The modules of a gap: "embedding", or "norm, head"."""
    names = (str(node.meta["operator"]) for node in forward if lifetimes.segment[node] == segment)
    modules = dict.fromkeys(module for module in (name.split("/")[0] for name in names if "/" in name) if module)
    return ", ".join(modules) or "the model"
