"""Loads: how many rows go to each expert, as a part of all, and what that makes of the busiest rank.

    with_expert_load(program, {"layers.0.experts": (0.7, 0.1, 0.1, 0.1)})     the program whose products say so
    busiest_part((0.25, 0.25, 0.25, 0.25), ranks=2, rows=4096)                0.504: half of them, and its luck
    fullest_part((0.25, 0.25, 0.25, 0.25), ranks=2, rows=4096)                0.520: it has more in one step of 100

What is said here changes prices, never values: graphs of a rank hold as many rows as the busiest rank expects, and a
run computes with those that come.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar._compat import LazyGraphModule
from autopar.graphs.graph_copies import copied
from autopar.graphs.operator_names import base_name
from autopar.program import MicroProgram, Program

AnyProgram = TypeVar("AnyProgram", Program, MicroProgram)

LOAD = "expert_load"
"""Key in the meta of a product of experts: the part of the rows that goes to each."""
REPLICATED = "replicated_experts"
"""Key in the meta of a product of experts: those of which every rank has a copy where rows travel."""
EXCHANGED = "exchanged_rows"
"""Key in the meta of an exchange of rows: its `ExchangedRows`."""
OWN_ROWS = "own_rows"
"""Key in the meta of a product with a block of the experts: what part of its rows has one of these."""
PRODUCTS = ("expert_linear", "expert_outer")
EXCEEDED, HALVINGS = 0.01, 40
"""How likely some rank may have more rows in a step than memory is planned for, and how often that is bracketed."""
WORTH_ONCE = 0.95
"""Part of the rows below which tokens travel instead: who gets which is exchanged, too."""
_LEAST_LIKELY, _ROUNDS = 1e-3, 5
"""Part of the tokens that an expert has at least and leaves at least, and how often odds are mended: of 16 experts
loaded by Zipf's law, what travels is then within 0.1 % of draws, 2 % without."""
NONE: Mapping[str, Sequence[int]] = {}
REACH, POINTS = 6.0, 64
"""How far from the mean of the busiest rank a count is looked for, in standard deviations, and at how many points."""


def with_expert_load(
    program: AnyProgram, load: Mapping[str, Sequence[float]], replicated: Mapping[str, Sequence[int]] = NONE
) -> AnyProgram:
    """The program whose products of experts carry the load of their module, and the experts of it that are replicated;
    the program itself where they carry them already."""

    def said(node: fx.Node) -> Mapping[str, object]:
        module, both = module_of(node), ((LOAD, load), (REPLICATED, replicated))
        return {key: tuple(each[module]) for key, each in both if module in each}

    return with_said_of_experts(program, said)


def with_said_of_experts(program: AnyProgram, said: Callable[[fx.Node], Mapping[str, object]]) -> AnyProgram:
    """The program whose products of experts have in their meta what is said of them; the program itself where they have
    it already."""
    if isinstance(program, MicroProgram):
        return replace(program, program=with_said_of_experts(program.program, said),
                       whole=with_said_of_experts(program.whole, said))  # fmt: skip
    if all(said(node).items() <= node.meta.items() for node in expert_products(program.graph)):
        return program
    module = LazyGraphModule(program.graph_module, copied(program.graph))
    for node in expert_products(module.graph):
        node.meta |= said(node)
    return replace(program, graph_module=module)


def expert_products(graph: fx.Graph) -> list[fx.Node]:
    """The products of experts of a captured graph."""
    return [n for n in graph.nodes if n.op == "call_function" and base_name(n.target) in PRODUCTS]


def expert_counts(graph: fx.Graph) -> dict[str, int]:
    """Module -> how many experts its products have."""
    return {
        module_of(node): int(node.all_input_nodes[1].meta["val"].shape[0])
        for node in expert_products(graph)
        if base_name(node.target) == "expert_linear"
    }


def module_of(node: fx.Node) -> str:
    """The module whose call a node is part of."""
    return str(node.meta.get("operator", "")).partition("/")[0]


@cache
def busiest_part(shares: tuple[float, ...], ranks: int, rows: int) -> float:
    """The part of `rows` rows that the rank with most of them expects; experts lie in blocks, as torch.chunk cuts them.

    shares: of each expert, summing to 1. Rows choose independently of each other here; those of one text do not, so
    that real loads are less even. Counts of ranks are taken for independent normal numbers. The mean of their largest
    is the largest mean, plus the integral, over all values above it, of how likely one of them is larger, less that,
    over all values below, of how likely none is.
    """
    parts = _parts(shares, ranks)
    most, spread = _largest(parts, rows)
    if spread == 0.0 or ranks == 1:
        return most
    step, found = REACH * spread / POINTS, most
    for point in range(-POINTS, POINTS):
        at = most + (point + 0.5) * step
        below = _none_above(at, parts, rows)
        found += step * ((1.0 - below) if at > most else -below)
    return min(1.0, found)


@cache
def fullest_part(shares: tuple[float, ...], ranks: int, rows: int) -> float:
    """The part of `rows` rows than which no rank has more, but with the chance `EXCEEDED`; as `busiest_part`."""
    parts = _parts(shares, ranks)
    most, spread = _largest(parts, rows)
    below, above = most, min(1.0, most + REACH * spread)
    for _ in range(HALVINGS):
        middle = 0.5 * (below + above)
        if _none_above(middle, parts, rows) < 1.0 - EXCEEDED:
            below = middle
        else:
            above = middle
    return above


def _parts(shares: Sequence[float], ranks: int) -> Counter[float]:
    """The part of the rows that a rank expects -> how many ranks do."""
    block = -(-len(shares) // ranks)
    return Counter(math.fsum(shares[start : start + block]) for start in range(0, len(shares), block))


def _largest(parts: Counter[float], rows: int) -> tuple[float, float]:
    """Mean and standard deviation of the part that the rank with the largest expects."""
    most = max(parts)
    return most, math.sqrt(most * (1.0 - most) / max(rows, 1))


def _none_above(value: float, parts: Counter[float], rows: int) -> float:
    """How likely no rank has more than this part of the rows."""
    return math.prod(_below(value, part, rows) ** count for part, count in parts.items())


class ExchangedRows(NamedTuple):
    """What goes over the links. rows: of each rank, at home; parts: of these to every rank of the group, what stays at
    home whatever the load is in none; back: they return. travels: of the rows that the busiest rank computes, the part
    that came to experts of its own."""

    rows: int
    parts: tuple[float, ...]
    back: bool
    travels: float

    def sent(self, position: int) -> list[float]:
        """Rows that the rank at a position of the group sends to every rank of it."""
        return [self.rows * (self.parts[position] if self.back else part) for part in self.parts]


class BusiestRows(NamedTuple):
    """Parts of the rows of a layer. computed: by the rank with most of them; received: for experts of its own, among
    these; fullest: than which none computes more, but with the chance `EXCEEDED`."""

    computed: float
    received: float
    fullest: float


@cache
def sent_parts(
    shares: tuple[float, ...], replicated: tuple[int, ...], ranks: int, chosen: int = 1
) -> tuple[float, ...]:
    """How many rows a rank sends to each, as a part of its own; experts lie in blocks, as torch.chunk cuts them, and
    rows of replicated ones travel nowhere.

    chosen: so many rows are those of one token, for different experts, and what is sent are tokens, each once to a
    rank. A set of experts is chosen in proportion to the product of their odds (conditional Poisson sampling), which
    are such that every expert has its share; a token has none of a rank's with the part of the sets without these.
    """
    block, travel = -(-len(shares) // ranks), travelling(shares, replicated)
    starts = range(0, block * ranks, block)
    if chosen == 1:
        return tuple(math.fsum(travel[start : start + block]) for start in starts)
    if chosen * max(shares) > 1.0 + _LEAST_LIKELY:  # no set of different experts has one so often
        sums = (math.fsum(travel[start : start + block]) for start in starts)
        return tuple((1.0 - (1.0 - min(part, 1.0)) ** chosen) / chosen for part in sums)
    odds = _odds(shares, chosen)
    every, found = _weights_of_sets(odds, chosen)[chosen], []
    for start in starts:
        own = [expert for expert in range(start, min(start + block, len(shares))) if expert not in replicated]
        found.append((1.0 - _weights_of_sets(np.delete(odds, own), chosen)[chosen] / every) / chosen)
    return tuple(map(float, found))


def _odds(shares: Sequence[float], chosen: int) -> NDArray[np.float64]:
    """(E,) of every expert, by which sets of so many have it as often as its share says."""
    wanted = np.clip(chosen * np.array(shares), _LEAST_LIKELY, 1.0 - _LEAST_LIKELY)
    odds: NDArray[np.float64] = wanted / (1.0 - wanted)
    wanted = odds
    for _ in range(_ROUNDS):
        weights, without = _weights_of_sets(odds, chosen), np.ones_like(odds)
        for size in range(1, chosen):
            without = weights[size] - odds * without  # of sets of this size that lack the expert
        part = np.clip(odds * without / weights[chosen], _LEAST_LIKELY, 1.0 - _LEAST_LIKELY)
        odds = odds * wanted * (1.0 - part) / part
    return odds


def _weights_of_sets(odds: NDArray[np.float64], chosen: int) -> NDArray[np.float64]:
    """(chosen + 1,) by size: the sum over all sets of experts of the products of their odds."""
    sums = np.zeros(chosen + 1)
    sums[0] = 1.0
    for one in odds:
        sums[1:] += one * sums[:-1]
    return sums


def once_per_rank(shares: tuple[float, ...], replicated: tuple[int, ...], ranks: int, chosen: int) -> float | None:
    """How many tokens travel, as a part of the rows that would: each once to a rank. None where that saves little."""
    if chosen == 1 or ranks == 1 or not sum(travelling(shares, replicated)):
        return None
    rows, tokens = (math.fsum(sent_parts(shares, replicated, ranks, many)) for many in (1, chosen))
    return tokens / rows if tokens <= WORTH_ONCE * rows else None


def travelling(shares: Sequence[float], replicated: Collection[int]) -> tuple[float, ...]:
    """The part of all rows that travels to each expert."""
    return tuple(0.0 if expert in replicated else share for expert, share in enumerate(shares))


def busiest_rows(shares: Sequence[float], replicated: Collection[int], ranks: int, rows: int) -> BusiestRows:
    """Where rows of replicated experts, and those of no expert among these, stay at home, as many at every rank."""
    travel = travelling(shares, replicated)
    home = max(0.0, 1.0 - math.fsum(travel)) / ranks
    received = busiest_part(travel, ranks, rows)
    return BusiestRows(received + home, received, fullest_part(travel, ranks, rows) + home)


def _below(value: float, part: float, rows: int) -> float:
    """How likely a rank that expects a part of the rows has at most `value` of them."""
    spread = math.sqrt(part * (1.0 - part) / max(rows, 1))
    return float(value >= part) if spread == 0.0 else 0.5 * (1.0 + math.erf((value - part) / (spread * math.sqrt(2.0))))


def load_of(node: fx.Node, experts: int) -> tuple[float, ...]:
    """The load that a product carries; even where it carries none."""
    found: tuple[float, ...] = node.meta.get(LOAD, (1.0 / experts,) * experts)
    return found


def said_of(node: fx.Node) -> tuple[object, object]:
    """What a product carries of loads and copies."""
    return node.meta.get(LOAD), node.meta.get(REPLICATED)


def replicated_of(node: fx.Node) -> tuple[int, ...]:
    """The experts of a product that are replicated where its rows travel."""
    found: tuple[int, ...] = node.meta.get(REPLICATED, ())
    return found
