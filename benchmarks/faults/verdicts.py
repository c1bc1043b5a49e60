"""Verdicts: from what became of every process of a fault to one word.

    right                      every process computed what the plain model computes
    warned                     something else than the plain model, and the log says what was left out
    refused                    an AutoparError on every process, and the words that must be named stand in them
    refused without naming     the words are missing: a user would not know what to mend
    refused what is sound      an AutoparError where nothing was wrong
    foreign traceback          an error of another kind: a fault of autopar's, as far as a user can tell
    crashed                    a process died that nobody killed
    lost                       a file that was there before is gone or changed
    silently wrong             it went on, and computed, kept or ran something else
    hangs                      a process had to be killed when the time was over

The worst of the processes counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.faults.fault import Fault

Ending = Literal[
    "returned", "raised ours", "raised wrong", "warned", "raised torch's", "raised other", "died", "ran on"
]
Word = Literal[
    "right",
    "warned",
    "refused",
    "refused without naming",
    "refused what is sound",
    "foreign traceback",
    "crashed",
    "lost",
    "silently wrong",
    "hangs",
]

BY_WEIGHT: tuple[Word, ...] = (
    "right",
    "warned",
    "refused",
    "refused without naming",
    "refused what is sound",
    "foreign traceback",
    "crashed",
    "lost",
    "silently wrong",
    "hangs",
)
GOOD: frozenset[Word] = frozenset({"right", "warned", "refused"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """What became of one process. message: of its error; place: file and line where that was raised."""

    rank: int
    ending: Ending
    message: str = ""
    place: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """word: see the module docstring; happened: the same in a sentence; named: None where nothing was refused."""

    word: Word
    happened: str
    named: bool | None

    @property
    def good(self) -> bool:
        """Whether the run was right or said why not."""
        return self.word in GOOD


def judge(fault: Fault, ends: Sequence[RankEnd], lost: Sequence[str] = ()) -> Verdict:
    """The verdict over one fault. lost: the protected paths that are gone or changed."""
    judged = [end for end in ends if end.rank not in fault.culprits or end.ending in ("raised wrong", "warned")]
    said = " ".join(end.message for end in judged if end.ending in ("raised ours", "raised torch's"))
    missing = [word for word in fault.words if not re.search(word, said, re.IGNORECASE)]
    found: list[tuple[Word, str]] = [(_word(fault, end, not missing), _sentence(end)) for end in judged]
    found += [("lost", f"{path} is gone or changed") for path in lost]
    word, happened = max(found, key=lambda each: BY_WEIGHT.index(each[0]), default=("right", "ended"))
    if word == "refused without naming":
        happened += f" (does not name {', '.join(missing)})"
    refused = any(each in ("refused", "refused without naming") for each, _ in found)
    return Verdict(word=word, happened=happened, named=not missing if refused and fault.words else None)


def worse(first: Verdict, second: Verdict) -> Verdict:
    """The verdict that weighs more; of equals the second."""
    return first if BY_WEIGHT.index(first.word) > BY_WEIGHT.index(second.word) else second


def _word(fault: Fault, end: RankEnd, named: bool) -> Word:
    match end.ending:
        case "returned":
            return "right" if fault.right else "silently wrong"
        case "raised ours":
            return ("refused" if named else "refused without naming") if fault.words else "refused what is sound"
        case "raised torch's":
            return "refused" if fault.as_torch and named else "foreign traceback"
        case "raised other":
            return "foreign traceback"
        case "warned":
            return "warned"
        case "raised wrong":
            return "silently wrong"
        case "died":
            return "crashed"
    return "hangs"


def _sentence(end: RankEnd) -> str:
    begin = f"rank {end.rank} {'' if end.ending.startswith('raised') else end.ending}"
    return " ".join(filter(None, (begin.strip() + (":" if end.message else ""), end.message, end.place)))
