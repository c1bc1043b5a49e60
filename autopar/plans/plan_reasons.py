"""Reasons: what a plan answers and why it was taken, in sentences, from what the plan itself says.

    64 x 4,096 tokens a step in bf16 with adamw, on 8x8 H100-SXM
    computation binds: 463 ms of the step; communication that nothing hides takes 4.39 ms; memory is 58 % full
    next best is ZeRO-3, 23.5 ms slower: it waits 26.1 ms for communication that nothing hides (here 4.39 ms)
    does not run here: DDP

`facts` of the command line's page and the report's first screen read these lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.plans.next_gib import next_gib_of
from autopar.plans.plan_text import format_bytes, format_seconds
from autopar.plans.plan_value import PlanValue, Prediction

FULL = 0.95
"""Part of the allowed memory from which on it is said to bind."""
LEAST_TOLD = 0.1
"""Part of a difference below which its cause is not told."""


def question_in_words(plan: PlanValue) -> str:
    """Batch, precision, optimizer and cluster, as far as the plan says them."""
    shapes = list(plan.input_shapes.values())
    said = []
    if shapes and shapes[0]:
        said.append(f"{' x '.join(f'{size:,}' for size in shapes[0])} {_unit(plan, shapes[0][1:])} a step")
    elif plan.question.get("batch"):
        said.append(f"batch {plan.question['batch']}")
    if plan.precision:
        said.append(f"in {plan.precision}")
    if isinstance(plan.question.get("optimizer"), str):
        said.append(f"with {plan.question['optimizer']}")
    return f"{' '.join(said)}, on {plan.cluster}" if said else f"on {plan.cluster}"


def _unit(plan: PlanValue, rest: list[int]) -> str:
    entries = plan.question.get("inputs")
    dtype = str(next(iter(entries.values()))[1]) if isinstance(entries, dict) else ""
    if len(rest) == 1 and "int" in dtype:
        return "tokens"
    return "values" if rest else "samples"


def reasons(plan: PlanValue) -> tuple[str, ...]:
    """What binds, what the next best known plan costs and why, and which known plans do not run."""
    refused = [known.name for known in plan.baselines if known.error is not None and not known.is_out_of_time]
    found = [what_binds(plan), ladder_in_words(plan), next_best(plan)]
    found += [f"does not run here: {', '.join(refused)}"] if refused else []
    return tuple(line for line in found if line)


def idle_seconds(predicted: Prediction) -> float:
    """Of the step in which the busiest device neither computes nor waits for communication: bubbles of a schedule."""
    busy = predicted.compute_seconds + predicted.exposed_communication_seconds
    return max(0.0, predicted.step_seconds - busy) if busy else 0.0


def what_binds(plan: PlanValue) -> str:
    """The largest part of the step, the others beside it, and how full the memory is."""
    parts, predicted = list(_parts_of_step(plan)), plan.predicted
    if not predicted.compute_seconds or not predicted.step_seconds:
        return ""
    largest = max(parts, key=lambda part: part[2])
    said = [f"{format_seconds(largest[2])} of the step"]
    said += [f"{words} {format_seconds(seconds)}" for name, words, seconds in parts if name != largest[0] and seconds]
    limit = plan.question.get("memory_limit_bytes")
    full = predicted.peak_bytes / limit if isinstance(limit, int | float) and limit else 0.0
    if full:
        said.append(f"memory is {100 * full:.0f} % full" if full >= 0.01 else "less than 1 % of the memory is full")
    return f"{largest[0]} {'and memory bind' if full >= FULL else 'binds'}: {'; '.join(said)}"


def ladder_in_words(plan: PlanValue) -> str:
    """By which ways backward comes to what it reads, where these are several, and what more memory would buy."""
    sizes = plan.predicted.bytes_by_rung
    said = [", ".join(f"{format_bytes(size)} {rung}" for rung, size in sizes.items())] if sizes else []
    gib = next_gib_of(plan)
    said += [] if gib is None else [str(gib)]
    return f"memory ladder: {'; '.join(said)}" if said else ""


def _parts_of_step(plan: PlanValue) -> Iterator[tuple[str, str, float]]:
    """(name, its words beside another part, seconds). Of a pipeline the planner plays whole passes, with the
    collectives inside them."""
    predicted = plan.predicted
    if plan.in_stages:
        yield "work in the stages", "passes with their collectives take", predicted.compute_seconds
        yield "sending between stages", "sending between stages takes", predicted.exposed_communication_seconds
        yield "waiting for other stages", "the busiest device waits for others", idle_seconds(predicted)
    else:
        yield "computation", "computation takes", predicted.compute_seconds
        hidden = "communication that nothing hides takes"
        yield "communication", hidden, predicted.exposed_communication_seconds


def next_best(plan: PlanValue) -> str:
    """The fastest known plan beside the chosen one, and which part of its step makes the difference."""
    own = plan.predicted
    others = [(known, known.predicted) for known in plan.baselines if known.predicted not in (None, own)]
    best = min(others, key=lambda pair: _step(pair[1]), default=None)
    if best is None or best[1] is None:
        return _next_schedule(plan)
    known, theirs = best
    more = theirs.step_seconds - own.step_seconds
    same = [other.name for other in plan.baselines if other.predicted == own]
    return f"{f'the same step as {same[0]}; ' if same else ''}next best is {known.name}, " + _differs(own, theirs, more)


def _next_schedule(plan: PlanValue) -> str:
    """Of a pipeline without known plans: what it was compared with is other pipelines, whose cost is their step."""
    priced = {other.name: other.objective_seconds for other in plan.alternatives if other.objective_seconds is not None}
    if not plan.in_stages or not priced:
        return ""
    name = min(priced, key=priced.__getitem__)
    more = priced[name] - plan.objective_seconds
    return f"next best is {name}, {format_seconds(abs(more))} {'slower' if more >= 0 else 'faster'}"


def _step(predicted: Prediction | None) -> float:
    return predicted.step_seconds if predicted is not None else float("inf")


def _differs(own: Prediction, theirs: Prediction, more: float) -> str:
    """ "23.5 ms slower: it waits 26.1 ms for communication that nothing hides (here 4.39 ms)"."""
    causes = list(_causes(own, theirs, more))
    memory = f"with {format_bytes(theirs.peak_bytes)} per device (here {format_bytes(own.peak_bytes)})"
    how = f"{format_seconds(abs(more))} {'slower' if more >= 0 else 'faster'}"
    return f"{how}: it {' and '.join(causes)}, {memory}" if causes else f"{how}, {memory}"


def _causes(own: Prediction, theirs: Prediction, more: float) -> Iterator[str]:
    pairs = (
        ("waits {} for communication that nothing hides", theirs.exposed_communication_seconds,
         own.exposed_communication_seconds),
        ("computes {}", theirs.compute_seconds, own.compute_seconds),
    )  # fmt: skip
    for words, there, here in pairs:
        if more and (there - here) / more >= LEAST_TOLD:
            yield f"{words.format(format_seconds(there))} (here {format_seconds(here)})"
