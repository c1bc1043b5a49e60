"""Are explanations true? Random choices of several plans: what they say that switching costs, evaluated by others.

    python -m benchmarks.explanations                    all plans, results/explanations.json
    python -m benchmarks.explanations gpt-named          one of them, printed only

For every choice the plan is explained as `plan.explain(name, exact=True)` does. Its difference to the runner-up is
compared with the raw one-hot program of the same prices, with and without the choice, as HiGHS solves it (small
graphs), and with a recount of both plans from their layouts (all graphs); `benchmarks.explanation_checks` says what
these share with the planner. Every limit that is said to bind is taken away, and the relaxed problem given to HiGHS as
well: the objective must fall. That a size does not divide cannot be taken away: there the plan of a model of equal
work, whose size divides, must cost less, and its explanation must not say so.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopar.errors import InfeasibleError
from autopar.explain.answers import Explanations
from autopar.explain.binding_limits import BindingLimits
from autopar.explain.origin import Remembered
from autopar.explain.recovered import recovered_plan
from autopar.explain.switches import switch_of
from autopar.explain.what_if import Planner
from autopar.planner.memory.recomputation import RECOMPUTED, state_of
from autopar.planner.one_mesh.mesh_plan import EXACT_GAP
from autopar.planner.one_mesh.read_solution import describe
from autopar.planner.one_mesh.recovered_problem import Recovered, described
from autopar.planner.one_mesh.solved_again import Resolved, Resolver
from autopar.plans.parallel_plan import Plan
from benchmarks.explanation_checks import MOST_VARIABLES, Recount, raw_optimum, raw_variables, recounted
from benchmarks.models import Inputs, gpt2, llama, t5, token_inputs
from benchmarks.results import write_results

RESULTS = Path(__file__).parent / "results" / "explanations.json"
CHOICES = 10
HIGHS_SECONDS = 120.0
SEARCH_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its inputs, a cluster and what was asked of it. divisible: a model of equal work without the size that
    does not divide; indivisible: (operator, what its explanation says of that size)."""

    build: Callable[[], torch.nn.Module]
    inputs: Callable[[], Inputs]
    cluster: str
    asked: Mapping[str, Any] = field(default_factory=dict)
    divisible: Callable[[], torch.nn.Module] | None = None
    indivisible: tuple[str, str] = ("", "")

    def plan(self, build: Callable[[], torch.nn.Module]) -> Plan:
        """The plan of one of the two models."""
        with torch.device("meta"):
            model, inputs = build(), self.inputs()
        planner = Planner(model, inputs, cluster=self.cluster, optimizer=torch.optim.AdamW)
        return planner.plan(**self.asked)


def _gpt() -> torch.nn.Module:
    return gpt2(layers=2, width=256, heads=8, vocabulary=512, positions=64)


def _heads(number: int) -> Callable[[], torch.nn.Module]:
    return lambda: gpt2(layers=1, width=768, heads=number, vocabulary=512, positions=1024)


CASES: dict[str, Case] = {
    "gpt-named": Case(
        build=_gpt, inputs=lambda: token_inputs(512)(16, 64), cluster="2x4 H100-SXM",
        asked={"dims": {"dp_shard": 2, "tp": 4}},
    ),
    "gpt-wishes": Case(
        build=_gpt, inputs=lambda: token_inputs(512)(64, 64), cluster="4 A100-80", asked={
            "mesh": (4,), "constraints": {"lm_head": "R", "transformer.h.*.mlp.c_fc.weight": "S(1)"},
        },
    ),
    "gpt-memory": Case(
        build=_gpt, inputs=lambda: token_inputs(512)(256, 64), cluster="4 cpu",
        asked={"mesh": (4,), "memory_limit": "272MiB", "recompute": "none", "micro_batches": 1},
    ),
    "t5": Case(
        build=lambda: t5(layers=1, width=256, heads=8, vocabulary=512), inputs=lambda: token_inputs(512)(16, 64),
        cluster="4 H100-SXM", asked={"dims": {"tp": 4}},
    ),
    "gpt-heads": Case(
        build=_heads(6), inputs=lambda: token_inputs(512)(4, 1024), cluster="4 H100-SXM", asked={"dims": {"tp": 4}},
        divisible=_heads(8),
        indivisible=("transformer.h.0.attn/attention#0", "no split of h over tp=4: 6 does not divide"),
    ),
    "llama-wide": Case(
        build=lambda: llama(layers=4, width=4096, hidden=14336, heads=32, kv_heads=8, vocabulary=128256,
                            positions=4096),
        inputs=lambda: token_inputs(128256)(64, 4096), cluster="8x8 H100-SXM", asked={"mesh": (8, 8)},
    ),
}  # fmt: skip


def check(name: str, case: Case, seed: int = 0) -> dict[str, Any]:
    """Rows of one plan: choices and limits, each with what it says and what the evaluators find."""
    began = time.process_time()
    plan = case.plan(case.build)
    assert isinstance(plan.origin, Remembered)
    recovered = recovered_plan(plan.origin.source, plan)
    resolver = Resolver(recovered, SEARCH_SECONDS, EXACT_GAP)
    names = [v.name for v in recovered.built.variables if v.kind in ("parameter", "operator") and len(v.costs) > 1]
    recount = Recount(recovered.query, recovered.mesh, recovered.built, recovered.labels.tolist())
    return {
        "plan": name,
        "mesh": dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        "decisions": len(recovered.built.variables),
        "raw_variables": raw_variables(recovered.built.problem),
        "stored_objective_seconds": plan.objective_seconds,
        "objective_seconds": recovered.objective,
        "recounted_seconds": recount.seconds(),
        "redistributions": {"worked_out": recount.own, "by_the_lowering": recount.found},
        "choices": _choices(recovered, resolver, random.Random(seed).sample(names, len(names))),
        "limits": [*_limits(plan, recovered, resolver), *_sizes(plan, case)],
        "cpu_seconds": time.process_time() - began,
    }


def _choices(recovered: Recovered, resolver: Resolver, names: Sequence[str]) -> list[dict[str, Any]]:
    """Of the first names, until as many as are checked have a runner-up."""
    rows: list[dict[str, Any]] = []
    for name in names:
        if sum("seconds" in row for row in rows) == CHOICES:
            break
        rows.append(_choice(recovered, resolver, name))
    return rows


def _choice(recovered: Recovered, resolver: Resolver, name: str) -> dict[str, Any]:
    index = recovered.variable_of(name)
    variable = recovered.built.variables[index]
    row: dict[str, Any] = {"name": name, "chosen": describe(variable, int(recovered.labels[index]), recovered.mesh)}
    try:
        other = resolver.without_choice(index)
    except InfeasibleError as error:
        return {**row, "no_runner_up": str(error)}
    switch = switch_of(recovered, other, index)
    row |= {"runner_up": switch.choice, "seconds": switch.seconds, "at_least": switch.at_least}
    row["memory_took_part"] = bool(other.rows)
    if not any(state_of(v, int(label)) == RECOMPUTED for v, label in zip(other.built.variables, other.labels,
                                                                         strict=True)):  # fmt: skip
        row["recounted"] = _recount_of(recovered, other) - _recounted(recovered, recovered.labels.tolist())
    if raw_variables(other.built.problem) <= MOST_VARIABLES:
        has_states = recovered.built is not recovered.plain
        texts = np.array(described(other.built.variables[index], recovered.mesh, with_state=has_states))
        forbidden = {index: texts == describe(variable, int(recovered.labels[index]), recovered.mesh)}
        with_it = raw_optimum(recovered.built.problem, (), {}, HIGHS_SECONDS)
        without_it = raw_optimum(other.built.problem, other.rows, forbidden, HIGHS_SECONDS)
        row |= {"raw": without_it - recovered.objective, "raw_optimum_with_the_choice": with_it}
    return row


def _limits(plan: Plan, recovered: Recovered, resolver: Resolver) -> list[dict[str, Any]]:
    assert isinstance(plan.origin, Remembered)
    rows = []
    for relaxed in BindingLimits(plan.origin.source, plan, resolver).binding:
        best = relaxed.best
        row: dict[str, Any] = {"limit": relaxed.constraint, "gain_seconds": relaxed.gain_seconds}
        if raw_variables(best.built.problem) <= MOST_VARIABLES:
            row["raw"] = recovered.objective - raw_optimum(best.built.problem, best.rows, {}, HIGHS_SECONDS)
        rows.append(row)
    return rows


def _sizes(plan: Plan, case: Case) -> list[dict[str, Any]]:
    """The size that does not divide, as the operator's explanation names it, and what it costs."""
    if case.divisible is None:
        return []
    name, said = case.indivisible
    other = case.plan(case.divisible)
    if said not in _notes(plan, name) or said in _notes(other, name):
        raise RuntimeError(f"{name} says {_notes(plan, name)}, and {_notes(other, name)} where the size divides")
    assert isinstance(other.origin, Remembered)
    problem = recovered_plan(other.origin.source, other).built.problem
    gain = plan.objective_seconds - other.objective_seconds
    raw = plan.objective_seconds - raw_optimum(problem, (), {}, HIGHS_SECONDS)
    return [{"limit": said, "gain_seconds": gain, "raw": raw}]


def _notes(plan: Plan, name: str) -> str:
    explained = plan.explain(name)
    assert isinstance(explained, Explanations)
    return "; ".join(explained.choices[0].notes)


def _recounted(recovered: Recovered, labels: list[int]) -> float:
    return recounted(recovered.query, recovered.mesh, recovered.built, labels)


def _recount_of(recovered: Recovered, other: Resolved) -> float:
    return recounted(recovered.query, recovered.mesh, other.built, other.labels.tolist())


def worst(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Over all choices: the largest relative difference between what was said and what each evaluator found."""
    said = [choice for row in rows for choice in row["choices"] if "seconds" in choice]
    found = {}
    for evaluator in ("recounted", "raw"):
        pairs = [(choice["seconds"], choice[evaluator]) for choice in said if evaluator in choice]
        found[f"{evaluator}_choices"] = float(len(pairs))
        found[f"{evaluator}_worst"] = max((abs(a - b) / max(abs(b), 1e-9) for a, b in pairs), default=0.0)
    limits = [limit for row in rows for limit in row["limits"]]
    found["limits"] = float(len(limits))
    found["limits_that_lower"] = float(sum(1 for limit in limits if limit.get("raw", limit["gain_seconds"]) > 0))
    return found


def main() -> None:
    """Check the plans that are named, or all and write the results."""
    names = sys.argv[1:] or list(CASES)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_CACHE"] = folder  # presets, not what was measured on this machine before
        for name in names:
            rows.append(check(name, CASES[name]))
            print(name, worst(rows[-1:]), f"{rows[-1]['cpu_seconds']:.1f} CPU s", flush=True)
    if not sys.argv[1:]:
        write_results(RESULTS, {"worst": worst(rows), "plans": rows})
    print(worst(rows))


if __name__ == "__main__":
    main()
