"""Learning: a rule for every call of a program that has none, found and proven by execution before it is planned.

    learn_rules(program)         mylib.scale.default(float32[8192, 4096], float32[4096])  has  "a b, b -> a b" from now on

The call is made small (`call_example`), `discovery` looks for a rule, or takes the one that it left on disk, and the proof
runs at two sizes each time, whatever the disk says. A rule belongs to the call, shapes and attributes with it, for the
rest of the process; a call for which none was found is not tried again. What one process learned, others take over by
`take_rules`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from autopar.errors import ConfigurationError
from autopar.program import Program
from autopar.rules.binding import bind_rule
from autopar.rules.call import Call, call_of
from autopar.rules.call_example import PositionalOperator, Scale, example_of, is_the_same_call, positional, scales
from autopar.rules.child_process import run_in_child
from autopar.rules.discovery import search_rule
from autopar.rules.engine import discovered_rules, take_rules, uncovered
from autopar.rules.proof import BLOCK_ERRORS, call_for, prove_rule, run_operator
from autopar.timing import phase

log = logging.getLogger(__name__)


def learn_rules(program: Program) -> Mapping[str, str | None]:
    """Find rules for the calls of `program` that have none; what is known then of calls without a rule of their own, by
    `Call.text`. Raises ConfigurationError where the system cannot fork."""
    known = discovered_rules(program)
    calls = {call.text: call for call in map(call_of, uncovered(program).values()) if call.text not in known}
    if calls:
        with phase("discover", logging.INFO):
            take_rules({text: _learned(call) for text, call in calls.items()})
    return discovered_rules(program)


def _learned(call: Call) -> str | None:
    rule, reason = rule_by_execution(call)
    if rule is None:
        log.warning("no rule was discovered for %s: %s", call.text, reason)
    else:
        log.info("rule discovered and proven for %s: %s", call.text, rule)
    return rule


def rule_by_execution(call: Call) -> tuple[str | None, str]:
    """(rule of a call, found without looking at the table, or None; why there is none)."""
    if not hasattr(call.target, "_schema"):
        return None, "it is no operator of a library"
    reason = "its sizes and integers are too large for an example"
    operator = positional(call)
    for scale, other in scales(call):
        arguments = example_of(call, scale, 0)
        if not _in_child(lambda a=arguments, s=scale: _runs(operator, a, call, s)):
            reason = "no example with values made up runs and gives results of these shapes"
            continue
        try:
            rule = search_rule(operator, arguments).rule
        except ConfigurationError as error:
            reason = str(error)
            continue
        if rule is None:
            return None, "no split holds"
        examples = (arguments, example_of(call, other, 1))
        if _in_child(lambda r=rule, e=examples: _holds(r, operator, e, call)):
            return rule, ""
        reason = f"{rule!r} does not hold at other sizes"
    return None, reason


def _in_child(question: Any) -> bool:
    (answer,), _ = run_in_child(lambda _: question(), 1)
    return answer is True


def _runs(operator: PositionalOperator, arguments: tuple[Any, ...], call: Call, scale: Scale) -> bool:
    try:
        return is_the_same_call(call, scale, run_operator(operator, arguments))
    except BLOCK_ERRORS:
        return False


def _holds(rule: str, operator: PositionalOperator, examples: tuple[tuple[Any, ...], ...], call: Call) -> bool:
    """Whether the rule fits the call, and is proven by every example."""
    try:
        bind_rule(rule, call)
        for arguments in examples:
            results = run_operator(operator, arguments)
            bound = bind_rule(rule, call_for(operator, arguments, results))
            prove_rule(operator, arguments, results, bound, rule)
    except (ConfigurationError, *BLOCK_ERRORS):
        return False
    return True
