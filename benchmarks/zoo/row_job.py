"""What the processes do for one row: capture once, then answer three questions about the same program.

    step time               the planner's free choice
    weights apart           a memory limit below what replicated weights need; executed like the first
    no replicated compute   the planner must split every operator that it can; the share of FLOPs that it cannot

Small models on gloo are fastest where nothing is split, so the second and third plan are those that put rules to the
test. All three are executed. Rank 0 plans and broadcasts. An error of whatever class is what the zoo looks for, so it
ends a question and is kept with its first line; the questions after it are still asked.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autopar.capture import Captures
from autopar.errors import InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Shard
from autopar.planner.memory.shortage import DoesNotFit
from autopar.planner.planning import make_plan
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes, format_mesh
from autopar.program import Program
from autopar.questions import capture_example
from autopar.request import Request
from autopar.rules.engine import uncovered
from autopar.runtime.consensus import gather_from_all
from autopar.runtime.parallel_module import ParallelModule
from benchmarks.agreement import Agreement, Reference, compare, evident_reference
from benchmarks.under_plan import UnderPlan
from benchmarks.zoo.registry import Inputs, ZooEntry, find_entry, make
from benchmarks.zoo.row import APART, NO_REPLICATION, STEP_TIME, Answer, Row

Result = TypeVar("Result")
APART_FRACTION = 0.5
"""First memory limit, as a part of what the weights, their gradients and optimizer state take on one device."""
LOOSER, ATTEMPTS = 1.1, 2
"""Where nothing fits: the next limit, as a multiple of the least that the planner found; and how many are tried."""
APART_MESHES: Mapping[int, tuple[int, ...]] = {2: (2,), 4: (2, 2)}
"""Processes -> the one mesh of the second question; there is no time to try others."""


def ready() -> None:
    """Meet the others: workers that answer have imported what a row needs. torch's advice on speed is left out."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.barrier()


def check(name: str, modules: Sequence[str], report: Callable[[Any], None]) -> Row:
    """All questions about the entry `name` of `modules`; runs on every rank and returns the row.

    What disagrees in fp32 is asked again in fp64, where only a wrong plan disagrees: rounding that takes one of a
    million activations over a kink (ReLU, max pooling) moves a gradient by one part in hundreds.
    """
    entry = find_entry(name, modules)
    journal = Journal(Row(name=entry.name, family=entry.family), report)
    row = _asked(entry, journal)
    if row.status != "disagrees" or row.precision == "fp64":
        return row
    journal.row = Row(name=entry.name, family=entry.family, in_fp32=row.reasons)
    return _asked(replace(entry, dtype=torch.float64), journal)


def _asked(entry: ZooEntry, journal: Journal) -> Row:
    """The row of an entry in its precision."""
    with journal.phase("build"):
        model, inputs = make(entry)
    with journal.phase("reference"):
        model, inputs, expected = evident_reference(model, inputs, entry.loss_fn)
    with journal.phase("capture"):
        program, error = _attempt(lambda: _capture(entry, model, inputs))
    if program is None:
        journal.update(error=error)
        return journal.row
    journal.update(
        captured=True,
        precision="fp64" if any(parameter.dtype == torch.float64 for parameter in model.parameters()) else "fp32",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        operators=sum(node.op == "call_function" for node in program.graph.nodes),
        uncovered=tuple(f"{operator}/{node.target}" for operator, node in uncovered(program).items()),
    )
    questions: dict[str, Callable[[], tuple[Plan, str]]] = {
        STEP_TIME: lambda: (_plan(program), ""),
        APART: lambda: _plan_apart(program),
        NO_REPLICATION: lambda: (
            _plan(program, constraints="no_replicated_compute", mesh=(dist.get_world_size(),)),
            "",
        ),
    }
    for question, solve in questions.items():
        with journal.phase(f"plan: {question}"):
            plan, answer = _answer(program, solve)
        journal.answer(question, answer)
        if plan is None:
            continue
        with journal.phase(f"run: {question}"):
            run = partial(_run, entry, model, inputs, program, plan, expected)
            agreement, error = _attempt(run, journal.tell)
        journal.answer(question, replace(answer, agreement=agreement, error=error))
    return journal.row


class Journal:
    """The row while it grows; rank 0 reports every change."""

    def __init__(self, row: Row, report: Callable[[Any], None]) -> None:
        self.row = row
        self._report = report

    def update(self, **changes: Any) -> None:
        """Replace fields of the row."""
        self.row = replace(self.row, **changes)
        if dist.get_rank() == 0:
            self._report(self.row)

    def answer(self, question: str, answer: Answer) -> None:
        """Keep the answer of a question."""
        self.update(answers={**self.row.answers, question: answer})

    def tell(self, error: str) -> None:
        """An error of this rank, told before the others are asked: they may never answer."""
        self._report(error)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what runs now, and keep how long it took."""
        self.update(phase=name)
        started = time.perf_counter()
        yield
        self.update(seconds={**self.row.seconds, name: round(time.perf_counter() - started, 3)})


def _attempt(
    action: Callable[[], Result], tell: Callable[[str], None] = lambda error: None
) -> tuple[Result | None, str]:
    """(result, "") where `action` succeeded on all ranks, else (None, the error of the first rank that failed)."""
    result, message = None, ""
    try:
        result = action()
    except Exception as error:  # the zoo reports errors of every class
        message = _first_line(error)
        tell(message)
    messages = [text for text in gather_from_all(message) if text]
    return (None, messages[0]) if messages else (result, "")


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0].strip()}"[:400]


def _answer(program: Program, solve: Callable[[], tuple[Plan, str]]) -> tuple[Plan | None, Answer]:
    """Plan on rank 0; every rank gets the plan and the answer that describes it."""
    outcome: list[Any] = [None, "", ""]
    if dist.get_rank() == 0:
        try:
            plan, forced_by = solve()
            outcome = [plan.to_json(), forced_by, ""]
        except Exception as error:  # the zoo reports errors of every class
            outcome = [None, "", _first_line(error)]
    dist.broadcast_object_list(outcome, src=0)
    text, forced_by, message = outcome
    if text is None:
        return None, Answer(error=message)
    plan = Plan.from_json(text)
    return plan, Answer(
        forced_by=forced_by,
        mesh=format_mesh(dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))),
        objective_seconds=plan.objective_seconds,
        gap=plan.gap,
        peak_bytes=plan.predicted.peak_bytes,
        sharded_share=_sharded_share(program, plan),
        replicated_share=float(plan.statistics["replicated_flops_share"]),
    )


def _plan(program: Program, **question: Any) -> Plan:
    cluster = Cluster.detect(dist.get_world_size())
    return make_plan(program, Request(cluster=cluster, with_baselines=False, mode="fast", **question))


def _plan_apart(program: Program) -> tuple[Plan, str]:
    """A plan whose weights cannot all be replicated, and what forced them apart.

    A device that held all weights with gradients and optimizer state would need `whole` bytes, so a limit below that
    is enough. Where activations alone exceed it, no limit does it, and the weights are stored split by ZeRO-3 instead.
    """
    states = state_bytes(program, None)
    whole = sum(
        math.prod(entry.shape) * (entry.dtype.itemsize + states[entry.name].gradient + states[entry.name].optimizer)
        for entry in program.inputs
        if entry.role == "parameter"
    )
    limit = APART_FRACTION * whole
    for _ in range(ATTEMPTS):
        try:
            plan = _plan(program, memory_limit=limit, mesh=APART_MESHES[dist.get_world_size()])
        except DoesNotFit as error:
            limit = LOOSER * max(error.needed_bytes, limit)
            if limit >= whole:
                break
        except InfeasibleError:  # the limited search found nothing that obeys the constraints in its time
            break
        else:
            return plan, f"memory limit {format_bytes(limit)}, {limit / whole:.2f} of the weights and their state"
    zero3 = {"dp_shard": dist.get_world_size()}
    return _plan(program, dims=zero3), "all weights stored split (dp_shard): no such limit was met"


def _sharded_share(program: Program, plan: Plan) -> float:
    """Share of the parameter bytes that are stored split."""
    whole = split = 0
    for entry in program.inputs:
        if entry.role == "parameter":
            nbytes = math.prod(entry.shape) * entry.dtype.itemsize
            whole += nbytes
            split += nbytes * any(isinstance(p, Shard) for p in plan.parameters[entry.name].stored)
    return split / whole if whole else 0.0


def _capture(entry: ZooEntry, model: nn.Module, inputs: Inputs) -> Program:
    cluster = Cluster.detect(dist.get_world_size())
    request = Request(cluster=cluster, loss_fn=entry.loss_fn, branches=entry.branches, batch_dims=entry.batch_dims)
    return capture_example(model, (), dict(inputs), request, Captures()).program


def _run(
    entry: ZooEntry, model: nn.Module, inputs: Inputs, program: Program, plan: Plan, expected: Reference
) -> Agreement:
    """One step under the plan; the agreement of the worst rank."""
    module = ParallelModule(copy.deepcopy(model), UnderPlan(program, plan), loss_fn=entry.loss_fn)
    module.build_for((), dict(inputs))
    found = gather_from_all(compare(module, inputs, expected))
    return max(found, key=lambda agreement: (not agreement.agrees, agreement.gradient_error / agreement.allowed))
