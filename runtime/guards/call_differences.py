"""Call differences: what ranks told about one point of their programs, as the sentence that says who does what.

    rank 1 started eval call 7, the others train call 7: all ranks make the same calls in the same order; ...
    in train call 7 rank 1 passed (3, 8) as x, the others (4, 8): ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.runtime.guards.update_count import NOTHING_TO_UPDATE

Form = Mapping[tuple[str, str], str]
"""(verb, name) -> text: ("passed", "x") -> "(4, 8)", ("has", "frozen parameters") -> "none"."""

_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldOfCall:
    """What a rank tells. act: what it started; updates: its `UpdateCount`; shard: `data_shard()`; form: of what it was
    given; whole: digests of the inputs of which all ranks have the same, by name; part: of those that only ranks of one
    shard have the same."""

    act: str
    updates: int
    shard: tuple[int, int]
    form: Form
    whole: Mapping[str, int]
    part: Mapping[str, int]


def differences(told: Sequence[ToldOfCall]) -> str:
    """The first thing in which ranks differ, and the mend; of every rank one."""
    if len({one.act for one in told}) > 1:
        return (
            f"{_sentence([one.act for one in told], 'started')}: all ranks make the same calls and backward passes in "
            "the same order; look for a batch that some ranks skip (continue, break, data loaders of unequal length) "
            "and for calls under `if rank == 0`"
        )
    act = told[0].act
    return (
        _updates(act, [one.updates for one in told])
        or _forms(act, [one.form for one in told])
        or _whole(act, [one.whole for one in told])
        or _parts(act, told)
    )


def _updates(act: str, counts: Sequence[int]) -> str:
    if len(set(counts) - {NOTHING_TO_UPDATE}) <= 1:
        return ""
    told = [count if count != NOTHING_TO_UPDATE else max(counts) for count in counts]
    return (
        f"when {act} started, {_sentence([str(count) for count in told], 'had updated weights', ' times')}: they are "
        "no longer those of one model; every rank calls optimizer.step() behind the same batches"
    )


def _forms(act: str, forms: Sequence[Form]) -> str:
    for verb, name in dict.fromkeys(key for form in forms for key in form):
        values = [form.get((verb, name), "nothing") for form in forms]
        if len(set(values)) > 1:
            are_shapes = all(value.startswith("(") for value in values)
            mend = "; drop or pad a last batch that is shorter (drop_last=True)" if are_shapes else ""
            return f"in {act} {_sentence(values, verb, f' as {name}')}: these must be the same on every rank{mend}"
    return ""


def _whole(act: str, digests: Sequence[Mapping[str, int]]) -> str:
    names = _differing(digests)
    if not names:
        return ""
    strange, rest = _apart([str([values.get(name) for name in names]) for values in digests])
    return (
        f"in {act} {strange} passed other values of {_list(names)} than {rest}: every rank passes the same whole batch "
        '(seed and shuffle alike), or compile with batch="local" and let each rank pass its own part: '
        "index, count = module.data_shard()"
    )


def _parts(act: str, told: Sequence[ToldOfCall]) -> str:
    for shard in sorted({one.shard for one in told}):
        ranks = [rank for rank, one in enumerate(told) if one.shard == shard]
        names = _differing([told[rank].part for rank in ranks])
        if names:
            index, count = shard
            return (
                f"in {act} {_ranks(ranks)} passed different values of {_list(names)}, though each of them has part "
                f"{index} of the {count} parts of the batch: index, count = module.data_shard() are what a sampler "
                "takes as rank and num_replicas, not the rank and size of the job"
            )
    raise AssertionError("ranks differ in their numbers, and tell the same")


def _differing(digests: Sequence[Mapping[str, int]]) -> list[str]:
    names = dict.fromkeys(name for values in digests for name in values)
    return [name for name in names if len({values.get(name) for values in digests}) > 1]


def _sentence(values: Sequence[str], verb: str, behind: str = "") -> str:
    """rank 1 started a, the others b"""
    (usual, _), *_ = Counter(values).most_common()
    told = [
        f"{_ranks([rank for rank, value in enumerate(values) if value == other])} {verb} {other}{behind}"
        for other in dict.fromkeys(values)
        if other != usual
    ]
    return f"{', '.join(told)}, {_apart(values)[1]} {usual}"


def _apart(values: Sequence[str]) -> tuple[str, str]:
    """("ranks 1, 3", "the others"): those whose value is not the most frequent one, and those whose it is."""
    (usual, _), *_ = Counter(values).most_common()
    strange = [rank for rank, value in enumerate(values) if value != usual]
    rest = [rank for rank, value in enumerate(values) if value == usual]
    return _ranks(strange), "the others" if len(rest) > 1 else _ranks(rest)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _list(names: Iterable[str]) -> str:
    named = list(names)
    return ", ".join(named[:_NAMED]) + (", ..." if len(named) > _NAMED else "")
