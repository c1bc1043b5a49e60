"""Every room is drawn from, always alike, and no other room draws anew when one changes."""

from __future__ import annotations

from benchmarks.mutants.draw import LEAST_OF_A_ROOM, drawn
from benchmarks.mutants.operators import mutations_of

ROOMS = {
    "large": mutations_of("large.py", "".join(f"x{number} = {number}\n" for number in range(1000))),
    "small": mutations_of("small.py", "".join(f"x{number} = {number}\n" for number in range(20))),
    "tiny": mutations_of("tiny.py", "x = 1\ny = 2\n"),
}


def test_small_rooms_have_their_share_and_large_ones_more() -> None:
    found = drawn(ROOMS, 60, 0)
    assert len(found["tiny"]) == 2
    assert len(found["small"]) == LEAST_OF_A_ROOM + 1
    assert sum(map(len, found.values())) >= 60
    assert all(len(set(mutations)) == len(mutations) for mutations in found.values())


def test_a_room_draws_by_seed_and_alone() -> None:
    found = drawn(ROOMS, 60, 0)
    assert drawn(ROOMS, 60, 0) == found
    assert drawn(ROOMS, 60, 1)["large"] != found["large"]
    without = drawn({**ROOMS, "tiny": []}, 60, 0)
    assert without["small"][:LEAST_OF_A_ROOM] == found["small"][:LEAST_OF_A_ROOM]
