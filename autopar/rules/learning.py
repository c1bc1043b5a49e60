"""Learning: a rule for every call of a program that has none, found and proven by execution before it is planned.

    learn_rules(program)     mylib.scale.default(float32[8192, 4096], float32[4096])  has  "a b, b -> a b" from now on
    adopt_rules(program, plan.discovered)       the same from a plan: proven again, then taken

The call is made small (`call_example`), `discovery` looks for a rule, or takes the one that it left on disk, and the
proof runs at two sizes each time, whatever the disk says. A rule belongs to the call, shapes and attributes with it,
for the rest of the process; a call for which none was found is not tried again. Other processes take what one learned
from its plan (`take_rules`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autopar.errors import ConfigurationError, PlanMismatchError
from autopar.program import Program
from autopar.rules.binding import bind_rule
from autopar.rules.call import Call
from autopar.rules.call_example import (
    PositionalOperator,
    Scale,
    example_of,
    is_the_same_call,
    positional,
    scales,
    spread_beyond,
)
from autopar.rules.child_process import run_in_child
from autopar.rules.discovery import search_rule
from autopar.rules.engine import discovered_rules, take_rules, undescribed
from autopar.rules.proof import BLOCK_ERRORS, call_for, prove_rule, run_operator
from autopar.rules.registration import refuse_implementations
from autopar.rules.rule import Rule
from autopar.timing import phase

log = logging.getLogger(__name__)

Arguments: TypeAlias = tuple[Any, ...]


def learn_rules(program: Program) -> Mapping[str, str | None]:
    """Find rules for the calls of `program` that have none; what is known then of calls without a rule of their own, by
    `Call.text`, None where no rule was found. Raises ConfigurationError where the system cannot fork."""
    known = discovered_rules(program)
    calls = {text: call for text, call in sorted(undescribed(program).items()) if text not in known}
    if calls:
        with phase("discover", logging.INFO):
            take_rules({text: _learned(call) for text, call in calls.items()})
    return discovered_rules(program)


def adopt_rules(program: Program, stated: Mapping[str, str | None]) -> Mapping[str, str | None]:
    """Take what a plan states of calls of `program`, by `Call.text`; what is known of them then, as of `learn_rules`.

    A rule that this process did not find itself is proven first. Where the plan states rules, but none for a call (its
    sizes are others), one is looked for. Raises PlanMismatchError for a rule that does not hold.
    """
    if not stated:
        return discovered_rules(program)
    known, calls = discovered_rules(program), undescribed(program)
    new = {text: rule for text, rule in stated.items() if text in calls and known.get(text, "") != rule}
    for text, rule in new.items():
        if rule is not None and not is_proven(rule, calls[text]):
            raise PlanMismatchError(
                f"the plan states the rule {rule!r} for {text}, which does not hold when it is executed here: "
                "plan again"
            )
    take_rules(new)
    return learn_rules(program)


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
        (runs,), crashes = run_in_child(partial(_runs, operator, arguments, call, scale), 1)
        if crashes:
            return None, "it crashes, or hangs, on values made up"
        if not runs:
            reason = "no example with values made up runs and gives results of these shapes"
            continue
        try:
            rule = search_rule(operator, arguments).rule
        except ConfigurationError as error:
            reason = str(error)
            continue
        if rule is None:
            return None, "no split holds"
        for weaker in _weaker(rule):
            if _holds_at(weaker, call, scale, other):
                return weaker, ""
        reason = f"{rule!r} does not hold at other sizes and values"
    return None, reason


def _weaker(rule: str) -> Iterator[str]:
    """The rule; without partial sums that pass; without splits that leave something else than a sum, either."""
    signature, *effects = rule.split(" ; ")
    named = [effect for effect in effects if not effect.startswith("linear:")]
    yield rule
    if len(named) < len(effects):
        yield " ; ".join([signature, *named])
    if named:
        names = {effect.partition(":")[0] for effect in named}
        whole = " ".join("_" + "," * token.endswith(",") if token.rstrip(",") in names else token
                         for token in signature.split(" "))  # fmt: skip
        if any(factor.isalpha() for factor in whole):
            yield whole


def is_proven(rule: str, call: Call) -> bool:
    """Whether a rule holds for the call when it is executed: at two sizes, with values made up, small and large."""
    return any(_holds_at(rule, call, scale, other) for scale, other in scales(call))


def _holds_at(rule: str, call: Call, scale: Scale, other: Scale) -> bool:
    operator = positional(call)
    wide = example_of(call, other, 2, spread_beyond(call))
    examples = (example_of(call, scale, 0), example_of(call, other, 1))
    (answer,), _ = run_in_child(lambda _: _holds(rule, operator, examples, wide, call), 1)
    return answer is True


def _runs(operator: PositionalOperator, arguments: Arguments, call: Call, scale: Scale, _: int) -> bool:
    try:
        return is_the_same_call(call, scale, run_operator(operator, arguments))
    except BLOCK_ERRORS:
        return False


def _holds(
    rule: str, operator: PositionalOperator, examples: tuple[Arguments, ...], wide: Arguments, call: Call
) -> bool:
    """Whether the rule fits the call, and is proven by every example."""
    try:
        refuse_implementations(rule, str(operator))
        bind_rule(rule, call)
        for arguments in examples:
            results = run_operator(operator, arguments)
            prove_rule(operator, arguments, results, _bound(rule, operator, arguments, results), rule)
        results = run_operator(operator, wide)
        if all(map(_is_finite, results)):
            prove_rule(operator, wide, results, _bound(rule, operator, wide, results), rule, is_wide=True)
    except (ConfigurationError, *BLOCK_ERRORS):
        return False
    return True


def _bound(rule: str, operator: PositionalOperator, arguments: Arguments, results: tuple[Any, ...]) -> Rule:
    return bind_rule(rule, call_for(operator, arguments, results))


def _is_finite(result: Any) -> bool:
    return not isinstance(result, Tensor) or bool(torch.isfinite(result).all())
