"""Code: the program of one rank as readable Python, each line with where it comes from and what it takes.

    # forward
    mm = aten.mm(view, t)                          # layers.0.up/mm#0  (2048, 1024) S(0) R  190 us
    wait = all_gather_into_tensor(w, 8, 'dp_shard')  # layers.1.up.weight  (1024, 4096)  1.2 ms on dp_shard

Lines are those of the graph that the runtime runs, collectives in buckets and started early; seconds are the price
list's for the kernel or collective that begins in this line. A kernel of several lines stands at its first one. Of
several stages the schedule comes first, then the body of every pass:

    def step(batch):
        receive("layers.1/add#1")          # from stage 0 (ranks 0 .. 1)  4.0 MiB  95 us
        forward_1(0)                       # 1F0  layers.2 .. head  120 us
        backward_1(0)                      # 1B0  layers.2 .. head  240 us
        send("layers.2/add#1/bwd")         # to stage 0 (ranks 0 .. 1)  4.0 MiB  95 us
        optimizer()

A pass of several stages on one rank hands its value on without a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.explain.answers import RankProgram
from autopar.explain.asked_step import asked_step
from autopar.explain.graph_lines import graph_lines
from autopar.explain.source import Source
from autopar.passes.graph_text import with_comment
from autopar.passes.stages.cut_stages import Crossing
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes, format_seconds
from autopar.schedules.actions import PipeAction
from autopar.simulation.bodies import Body, Turn
from autopar.simulation.priced_stages import StepGraphs
from autopar.simulation.step_program import StepProgram

NAMES: dict[Turn, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward_of_inputs",
    "W": "backward_of_weights",
    "prepare": "gather_once",
    "late": "sum_gradients",
    "first": "first_forward",
    "last": "last_backward",
    "ending": "await_sums",
}


def rank_program(source: Source, plan: Plan, rank: int) -> RankProgram:
    """The program of one rank; seconds: of all kernels and collectives, of one step where there are several stages,
    else of one micro-batch with what runs once per step. Raises ConfigurationError for a rank that the plan does not
    have."""
    asked, group = asked_step(source, plan), plan.group_of(rank)
    printer = _Printer(plan, asked.graphs(rank), asked.step, group)
    if plan.in_stages:
        lines, seconds = printer.schedule(), printer.step_seconds
    else:
        lines, seconds = printer.passes_alone(), printer.kernel_seconds
    text = f"# rank {rank} of {plan.num_ranks}, " + "\n".join(lines)
    return RankProgram(rank=rank, text=text, seconds=seconds)


class _Printer:
    """Prints one rank of a group."""

    def __init__(self, plan: Plan, graphs: StepGraphs, step: StepProgram, group: int) -> None:
        self.plan, self.graphs, self.step, self.group = plan, graphs, step, group
        self.passes = graphs.passes.ranks[group]
        own = [graphs.of[stage] for stage in graphs.held_by(group)]
        self.bodies = {
            _name(body.turn, stage.number): body
            for stage in own
            for body in step.bodies(stage, {action.kind for action in self.passes if action.stage == stage.number})
        }
        self.last = step.last_passes(group) if plan.in_stages else {}
        for action, body in self.last.items():
            self.bodies[_name("last", action.stage)] = body
            del self.bodies[_name("late", action.stage)]
        if not plan.in_stages:  # what runs once per step is in the first forward and in the last backward
            ends = step.ends(own[0]).values()
            self.bodies = {name: body for name, body in self.bodies.items() if not body.is_once_per_step}
            self.bodies |= {_name(body.turn, own[0].number): body for body in ends}
        self.optimizer_seconds = math.fsum(step.optimizer_parts(own).values())

    @property
    def kernel_seconds(self) -> float:
        """Of the kernels and collectives of every pass once, with what runs once per step."""
        by_turn = {body.turn: body for body in self.bodies.values()}
        passes = [by_turn.get("first", by_turn["F"]), by_turn.get("last") or by_turn.get("B")]
        actions = [action for body in passes if body is not None for action in body.actions]
        return math.fsum(action.seconds for action in actions if action.kind != "views")

    @property
    def step_seconds(self) -> float:
        """Of all passes, of what runs once per step and of the optimizer."""
        once = [body.seconds for body in self.bodies.values() if body.is_once_per_step]
        passes = [self.bodies[self._name_of(action)].seconds for action in self.passes]
        return math.fsum([*once, *passes, self.optimizer_seconds])

    def passes_alone(self) -> Iterator[str]:
        """Every body as it stands: of the only stage."""
        yield f"{self.plan.micro_batches} micro-batches per step"
        for body in self.bodies.values():
            yield from ("", f"# {NAMES[body.turn]}", *_lines(body))

    def schedule(self) -> Iterator[str]:
        """The schedule, then every body once as a function."""
        held = ", ".join(f"{stage} ({self.plan.stages[stage].name})" for stage in self.graphs.held_by(self.group))
        yield f"in rank group {self.group}: stages {held}"
        yield f"# {self.plan.staged.schedule}, {self.plan.micro_batches} micro-batches per step"
        yield ""
        yield "def step(batch):"
        yield from self._once("prepare")
        for action in self.passes:
            yield from self._pass(action)
        yield from self._once("late")
        yield from self._once("ending")
        if self.step.program.training:
            yield with_comment("    optimizer()", format_seconds(self.optimizer_seconds))
        for name, body in self.bodies.items():
            parameter = "" if body.is_once_per_step else "micro_batch"
            yield from ("", "", with_comment(f"def {name}({parameter}):", format_seconds(body.seconds)))
            yield from (f"    {line}" for line in _lines(body))

    def _once(self, turn: Turn) -> Iterator[str]:
        for name, body in self.bodies.items():
            if body.turn == turn:
                yield with_comment(f"    {name}()", f"once per step  {format_seconds(body.seconds)}")

    def _pass(self, action: PipeAction) -> Iterator[str]:
        name = self._name_of(action)
        backward = action.kind != "F"
        crossings = [c for c in self.graphs.crossings if c.is_backward == backward and action.kind != "W"]
        yield from self._messages([c for c in crossings if c.target == action.stage], action, is_sent=False)
        what = f"{action}  {self.plan.stages[action.stage].name}  {format_seconds(self.bodies[name].seconds)}"
        yield with_comment(f"    {name}({action.micro_batch})", what)
        yield from self._messages([c for c in crossings if c.source == action.stage], action, is_sent=True)

    def _name_of(self, action: PipeAction) -> str:
        return _name("last" if action in self.last else action.kind, action.stage)

    def _messages(self, crossings: Sequence[Crossing], action: PipeAction, *, is_sent: bool) -> Iterator[str]:
        for crossing in crossings:
            other = crossing.target if is_sent else crossing.source
            group = self.graphs.schedule.rank_of(other, action.micro_batch)
            if group == self.group:
                continue
            ranks = self.plan.rank_groups[group]
            last = ranks.first_rank + ranks.size - 1
            where = f"rank {last}" if ranks.size == 1 else f"ranks {ranks.first_rank} .. {last}"
            nbytes, seconds = self.graphs.message(crossing)
            verb, way = ("send", "to") if is_sent else ("receive", "from")
            yield with_comment(
                f"    {verb}({crossing.name!r})",
                f"{way} stage {other} ({where})  {format_bytes(nbytes)}  {format_seconds(seconds)}",
            )


def _lines(body: Body) -> Iterator[str]:
    return graph_lines(body.graph, body.stage.plan, body.inputs, body.prices)


def _name(turn: Turn, stage: int) -> str:
    return f"{NAMES[turn]}_{stage}"
