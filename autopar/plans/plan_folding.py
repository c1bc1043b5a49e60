"""Folding: the program of a rank with lines that repeat, as those of equal layers do, said once.

    mm = aten.mm(view, t)         # layers.0.up/mm#0          mm = aten.mm(view, t)         # layers.0.up/mm#0
    mm_1 = aten.mm(view_1, t_1)   # layers.1.up/mm#0    -->   # ... and 2 times more, up to layers.2.up/mm#0
    mm_2 = aten.mm(view_2, t_2)   # layers.2.up/mm#0

Lines are alike where only the numbers of layers, of variables and of places in a bucket differ: shapes, layouts and
seconds are equal. A period may be several layers, as where one collective brings the parameters of two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

LEAST_LINES = 10
"""Shorter repetitions are read faster than a remark about them."""
MOST_PERIODS = 64
"""Next places of a line that are tried as the begin of a repetition."""
NUMBERS = re.compile(r"(?<=\w)_\d+\b|(?<=[A-Za-z_]\.)\d+(?=[./])")
PLACE = re.compile(r"(rows_part\(\w*, \d+, |attention\w*\(.*, )\d+(?=[,)])| +(?= )")
"""Where a piece begins in a bucket, the number of an attention, and blanks before a comment."""
OWNER = re.compile(r"# (\S+\.\d+\.\S+)")


def folded(text: str) -> str:
    """The text with repeated lines folded."""
    return "\n".join(_fold(text.splitlines()))


def _fold(lines: Sequence[str]) -> Iterator[str]:
    alike = [PLACE.sub(r"\1", NUMBERS.sub("", line)) for line in lines]
    places: dict[str, list[int]] = {}
    for index, line in enumerate(alike):
        places.setdefault(line, []).append(index)
    at = 0
    while at < len(lines):
        period, times = _repetition(alike, at, places[alike[at]])
        yield from lines[at : at + period]
        if times > 1:
            end = at + period * times
            last = next((m[1] for line in reversed(lines[at:end]) if (m := OWNER.search(line))), "here")
            yield f"# ... these {period} lines {times - 1} times more, up to {last}"
        at += period * times


def _repetition(alike: Sequence[str], at: int, places: Sequence[int]) -> tuple[int, int]:
    """(lines, how often) of the repetition from a line on that leaves out the most; (1, 1) where there is none."""
    best = (1, 1)
    for place in [place for place in places if place >= at + LEAST_LINES][:MOST_PERIODS]:
        period = place - at
        times = 1
        while alike[at : at + period] == alike[at + times * period : at + (times + 1) * period]:
            times += 1
        if times > 1 and period * (times - 1) > best[0] * (best[1] - 1):
            best = (period, times)
    return best
