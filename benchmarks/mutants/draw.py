"""Which mutants are tried: drawn by seed, at least five of every room and more of the larger ones.

A room is a package: `autopar.planner.solver` is its own modules, not those of packages inside. A change elsewhere in a
room draws anew there and leaves the other rooms as they were.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.mutants.operators import Mutation, mutations_of
from benchmarks.structure.source_tree import read_modules

LEAST_OF_A_ROOM = 5


def rooms(root: Path) -> dict[str, list[Mutation]]:
    """Package -> everything that could be changed in its modules; links are resolved, so that paths are files."""
    found: dict[str, list[Mutation]] = {}
    for module in read_modules(root, "autopar").values():
        room = module.name if module.is_package else module.name.rpartition(".")[0]
        path = (root / module.path).resolve().relative_to(root.resolve()).as_posix()
        found.setdefault(room, []).extend(mutations_of(path, module.text))
    return {room: mutations for room, mutations in sorted(found.items()) if mutations}


def drawn(mutations: Mapping[str, Sequence[Mutation]], count: int, seed: int) -> dict[str, list[Mutation]]:
    """About `count` over all rooms: `LEAST_OF_A_ROOM` of each (or all it has), the rest by size."""
    total = sum(map(len, mutations.values()))
    rest = max(0, count - sum(min(LEAST_OF_A_ROOM, len(found)) for found in mutations.values()))
    chosen = {}
    for room, found in mutations.items():
        size = min(len(found), LEAST_OF_A_ROOM + -(-rest * len(found) // total))
        order = random.Random(f"{seed}:{room}").sample(range(len(found)), len(found))
        chosen[room] = [found[index] for index in order[:size]]
    return chosen
