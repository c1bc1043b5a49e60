"""Rules found again: what `discover=True` finds for operators of the table, beside what the table says.

    python -m benchmarks.discovery                                            # one line per operator
    python -m benchmarks.discovery --only aten.sum                            # operators by name
    python -m benchmarks.discovery --json benchmarks/results/discovery.json   # also as a document; "-": on stdout

One call of every operator of the table, the first of its cases in `tests/rules`. The rule is looked for without the
table. Two rules are compared by what they allow: every split as the layouts of operands and results, and every pattern
of partial sums that passes. An operator is "found again" where all that the table allows is found, or "found more" if
something else is, too; "found less" says what is missing, and which implementation of ours (masks, halos, statistics)
it would need. Where the table itself allows nothing (a factory without operands), there is "nothing to find".
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest import mock

import torch

from autopar.rules.binding import bind_rule
from autopar.rules.call import Call, call_of
from autopar.rules.engine import rule_text
from autopar.rules.learning import rule_by_execution
from autopar.rules.rule import Rule, Tensor
from benchmarks.faults.__main__ import commit
from benchmarks.results import document, write_results
from tests.rules.case_values import Case
from tests.rules.execution import capture_call
from tests.rules.operator_cases import CASES

Verdict: TypeAlias = Literal["found again", "found more", "found less", "refused", "nothing to find"]
SIZE = 12
"""Of the cases: 2 and 3 divide it."""
WANTED = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRule:
    """An operator of the table and what was found of it. missing, extra: what only the table, or only the found rule
    allows; a missing split that needs an implementation of ours says which. reason: why none was found."""

    operator: str
    call: str
    table: str
    found: str | None
    verdict: Verdict
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    reason: str
    seconds: float


def operator_cases() -> list[Case]:
    """The first case of every operator, in the order of the cases."""
    first: dict[str, Case] = {}
    for case in CASES:
        first.setdefault(str(case.target), case)
    return list(first.values())


def call_of_case(case: Case) -> Call:
    """The call that a case makes."""
    torch.manual_seed(0)
    return call_of(capture_call(case.target, case.build(SIZE), case.kwargs).node)


def allowed(rule: Rule) -> dict[str, str]:
    """What a rule allows -> the implementation that it needs, "" if none: "S(0), R -> S(0)" splits one name."""
    splits = {_split(rule, name): rule.implementations.get(name, "") for name in rule.names}
    return {**splits, **{_passing(rule, marks): "" for marks in rule.linear}}


def _split(rule: Rule, name: str) -> str:
    left = rule.reductions.get(name, (None,) * len(rule.outputs))
    outputs = (_lies(t, name, rule, op) for t, op in zip(rule.outputs, left, strict=True) if t is not None)
    return f"{', '.join(_lies(t, name, rule, None) for t in rule.inputs)} -> {', '.join(outputs)}"


def _lies(tensor: Tensor, name: str, rule: Rule, reduction: str | None) -> str:
    for dim, factors in enumerate(tensor):
        if name in factors:
            outer = [rule.sizes[f] for f in factors[: factors.index(name)] if f is not None]
            return f"S({dim}{f' behind {outer}' if outer else ''})"
    return "R" if reduction is None else f"P({reduction})"


def _passing(rule: Rule, marks: Sequence[bool]) -> str:
    outputs = ", ".join("P(sum)" for output in rule.outputs if output is not None)
    return f"{', '.join('P(sum)' if mark else 'R' for mark in marks)} -> {outputs}"


def found_rule(case: Case) -> FoundRule:
    """What is found of the operator of a case."""
    call = call_of_case(case)
    table = rule_text(call)
    assert table is not None, f"{case.target} has no rule"
    begin = time.perf_counter()
    found, reason = rule_by_execution(call)
    seconds = time.perf_counter() - begin
    told = allowed(bind_rule(table, call))
    seen = {} if found is None else allowed(bind_rule(found, call))
    missing = tuple(f"{text} (by {told[text]})" if told[text] else text for text in told if text not in seen)
    extra = tuple(text for text in seen if text not in told)
    return FoundRule(
        operator=str(case.target),
        call=call.text,
        table=table,
        found=found,
        verdict=_verdict(found, told, missing, extra),
        missing=missing,
        extra=extra,
        reason=reason,
        seconds=round(seconds, 2),
    )


def _verdict(found: str | None, told: Mapping[str, str], missing: Sequence[str], extra: Sequence[str]) -> Verdict:
    if not told and not extra:
        return "nothing to find"
    if found is None:
        return "refused"
    if missing:
        return "found less"
    return "found more" if extra else "found again"


def found_rules(cases: Sequence[Case]) -> Iterator[FoundRule]:
    """One row per case; nothing is taken from the cache of this machine."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"AUTOPAR_CACHE": folder}):
        yield from map(found_rule, cases)


def summary(rows: Sequence[FoundRule]) -> Mapping[str, Any]:
    """Counts. whole: operators for which all that the table allows was found."""
    verdicts = Counter(row.verdict for row in rows)
    less = [row for row in rows if row.verdict == "found less"]
    return {
        "operators": len(rows),
        "whole": verdicts["found again"] + verdicts["found more"],
        "wanted": WANTED,
        "verdicts": dict(verdicts.most_common()),
        "less_only_by_implementations": sum(all("(by " in text for text in row.missing) for row in less),
        "seconds": round(sum(row.seconds for row in rows), 1),
    }


def main(words: Sequence[str]) -> None:
    """Print a line per operator and the counts; exits with 1 where fewer than `WANTED` of all were found again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators whose name holds this")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help='the document; "-": on stdout')
    options = parser.parse_args(words)
    rows = []
    for row in found_rules([case for case in operator_cases() if options.only in str(case.target)]):
        rows.append(row)
        said = "; ".join([*(f"lacks {text}" for text in row.missing), *(f"more: {text}" for text in row.extra)])
        print(f"{row.verdict:12} {row.operator}  {row.reason or said}", file=sys.stderr, flush=True)
    counts = summary(rows)
    print(json.dumps(counts), file=sys.stderr)
    content = {
        "commit": commit(),
        "command": ["python", "-m", "benchmarks.discovery", *words],
        "summary": counts,
        "rows": [asdict(row) for row in rows],
    }
    if options.json == "-":
        print(json.dumps(document(content), indent=1))
    elif options.json:
        write_results(Path(options.json), content)
    if not options.only and counts["whole"] < WANTED:
        sys.exit(1)


if __name__ == "__main__":
    logging.getLogger("autopar").setLevel(logging.ERROR)
    main(sys.argv[1:])
