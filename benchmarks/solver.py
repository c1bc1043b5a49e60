"""Time the exact solver on synthetic transformers: python benchmarks/solver.py [layers ...] [--mesh 16,8]

A layer is attention and MLP with residual adds, forward and backward. On every mesh axis a tensor is
replicated or sharded by one of its dims, a strategy is one choice per axis. Costs are a roofline (400
TFLOP/s, 2.5 TB/s) and alpha-beta communication (20 us + 25 GB/s on the outer axis, 6 us + 300 GB/s on the
last): synthetic, so the times say how the solver scales, not how good the plans are. CPU seconds, one run
each; the checker is timed as well.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopar.planner.solver import Edge, Problem, check_certificate, solve

FLOPS_PER_SECOND, BYTES_PER_SECOND = 400e12, 2.5e12
LATENCY_SECONDS, LINK_BYTES_PER_SECOND = (20e-6, 6e-6), (25e9, 300e9)
SIZES = {"b": 256, "s": 4096, "h": 8192, "q": 8192, "f": 28672}
Layout = tuple[str, ...]


@dataclass
class Tape:
    """Nodes and edges of a model under construction; a node is (layouts of its output, number)."""

    mesh: tuple[int, ...]
    costs: list[NDArray[np.float64]] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    outputs: list[tuple[str, tuple[Layout, ...]]] = field(default_factory=list)

    def add(self, dims: str, contracted: str, inputs: list[tuple[int, str]]) -> int:
        """Add an operator with output `dims` that reduces over `contracted`; inputs are (node, dims it
        reads).
        """
        strategies, costs = operator(self.mesh, dims, contracted)
        outputs = tuple(tuple(p if p in dims else "R" for p in strategy) for strategy in strategies)
        self.costs.append(costs)
        self.outputs.append((dims, outputs))
        for source, read in inputs:
            wanted = tuple(tuple(p if p in read else "R" for p in strategy) for strategy in strategies)
            dims_read, have = self.outputs[source]
            matrix = redistribution(self.mesh, dims_read, have, wanted)
            self.edges.append(Edge(source=source, target=len(self.costs) - 1, costs=matrix))
        return len(self.costs) - 1


@cache
def operator(mesh: tuple[int, ...], dims: str, contracted: str) -> tuple[list[Layout], NDArray[np.float64]]:
    """Return the strategies and their seconds: compute, traffic, and the all-reduce of contracted dims."""
    choices = ("R", *dims, *contracted)
    strategies = [s for s in itertools.product(choices, repeat=len(mesh)) if divides(mesh, s)]
    work = 2.0 * math.prod(SIZES[d] for d in dims + contracted)
    traffic = 2.0 * math.prod(SIZES[d] for d in dims)
    costs = []
    for strategy in strategies:
        parts = math.prod(size for size, p in zip(mesh, strategy, strict=True) if p != "R")
        kept = math.prod(size for size, p in zip(mesh, strategy, strict=True) if p in dims)
        reduced = [axis for axis, p in enumerate(strategy) if p in contracted]
        seconds = work / FLOPS_PER_SECOND / parts + traffic / BYTES_PER_SECOND / kept
        costs.append(seconds + sum(collective(mesh, axis, 2.0 * traffic / kept) for axis in reduced))
    return strategies, np.array(costs)


@cache
def redistribution(
    mesh: tuple[int, ...], dims: str, have: tuple[Layout, ...], wanted: tuple[Layout, ...]
) -> NDArray[np.float64]:
    """Return the seconds from each layout to each: all-gather, all-to-all, or a free slice, per axis."""
    size = 2.0 * math.prod(SIZES[d] for d in dims)
    costs = np.zeros((len(have), len(wanted)))
    for (i, source), (j, target) in itertools.product(enumerate(have), enumerate(wanted)):
        local = size / math.prod(n for n, p in zip(mesh, source, strict=True) if p != "R")
        for axis, (p, q) in enumerate(zip(source, target, strict=True)):
            if p not in ("R", q):
                costs[i, j] += collective(mesh, axis, local if q != "R" else local * mesh[axis])
    return costs


def collective(mesh: tuple[int, ...], axis: int, size: float) -> float:
    """Return the seconds that `size` bytes take over one axis."""
    tier = 1 if axis == len(mesh) - 1 else 0
    return LATENCY_SECONDS[tier] + size * (1.0 - 1.0 / mesh[axis]) / LINK_BYTES_PER_SECOND[tier]


def divides(mesh: tuple[int, ...], strategy: Layout) -> bool:
    """Return whether every dim can be split by the axes that share it."""
    parts = {p: math.prod(n for n, q in zip(mesh, strategy, strict=True) if q == p) for p in strategy if p != "R"}
    return all(SIZES[dim] % part == 0 for dim, part in parts.items())


def transformer(num_layers: int, mesh: tuple[int, ...]) -> Problem:
    """Return the joint forward and backward graph of `num_layers` layers."""
    tape = Tape(mesh)
    x = tape.add("bsh", "", [])
    saved = []
    for _ in range(num_layers):
        norm = tape.add("bsh", "", [(x, "bsh")])
        q, k, v = (tape.add("bsq", "h", [(norm, "bsh")]) for _ in range(3))
        attention = tape.add("bsq", "", [(q, "bsq"), (k, "bq"), (v, "bq")])
        y = tape.add("bsh", "", [(x, "bsh"), (tape.add("bsh", "q", [(attention, "bsq")]), "bsh")])
        norm2 = tape.add("bsh", "", [(y, "bsh")])
        gate, up = (tape.add("bsf", "h", [(norm2, "bsh")]) for _ in range(2))
        product = tape.add("bsf", "", [(gate, "bsf"), (up, "bsf")])
        z = tape.add("bsh", "", [(y, "bsh"), (tape.add("bsh", "f", [(product, "bsf")]), "bsh")])
        saved.append((norm, attention, norm2, gate, up, product))
        x = z
    gradient = tape.add("bsh", "", [(x, "bsh")])
    for norm, attention, norm2, gate, up, product in reversed(saved):
        tape.add("hf", "bs", [(gradient, "bsh"), (product, "bsf")])
        d_product = tape.add("bsf", "h", [(gradient, "bsh")])
        d_gate = tape.add("bsf", "", [(d_product, "bsf"), (gate, "bsf"), (up, "bsf")])
        tape.add("hf", "bs", [(d_gate, "bsf"), (norm2, "bsh")])
        d_norm2 = tape.add("bsh", "f", [(d_gate, "bsf")])
        middle = tape.add("bsh", "", [(gradient, "bsh"), (d_norm2, "bsh")])
        tape.add("hq", "bs", [(middle, "bsh"), (attention, "bsq")])
        d_attention = tape.add("bsq", "h", [(middle, "bsh")])
        d_q = tape.add("bsq", "", [(d_attention, "bsq"), (attention, "bsq")])
        tape.add("hq", "bs", [(d_q, "bsq"), (norm, "bsh")])
        d_norm = tape.add("bsh", "q", [(d_q, "bsq")])
        gradient = tape.add("bsh", "", [(middle, "bsh"), (d_norm, "bsh")])
    return Problem(node_costs=tuple(tape.costs), edges=tuple(tape.edges))


def main() -> None:
    """Print one line per number of layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", type=int, nargs="*", default=[2, 32, 126])
    parser.add_argument("--mesh", default="16,8")
    arguments = parser.parse_args()
    mesh = tuple(int(size) for size in arguments.mesh.split(","))
    print("layers  nodes  labels  matrices  status   proof        gap      solve s  check s")
    for num_layers in arguments.layers:
        problem = transformer(num_layers, mesh)
        solution = solve(problem)
        started = time.process_time()
        check_certificate(problem, solution)
        checked = time.process_time() - started
        labels = sum(costs.size for costs in problem.node_costs)
        matrices = len({id(edge.costs) for edge in problem.edges})
        print(
            f"{num_layers:6}  {len(problem.node_costs):5}  {labels:6}  {matrices:8}  "
            f"{solution.status.value:8} {solution.certificate.kind:11}  {solution.gap:.1e}  "
            f"{solution.statistics['cpu_seconds']:7.2f}  "
            f"{checked:7.2f}"
        )


if __name__ == "__main__":
    main()
