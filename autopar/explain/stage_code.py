"""Stage code: what a rank of a pipeline runs, as readable Python: the schedule, then the body of every pass.

    def step(batch):
        receive("layers.1/add#1")          # from stage 0 (ranks 0 .. 1)  4.0 MiB  95 us
        forward_1(0)                       # 1F0  layers.2 .. head  120 us
        backward_1(0)                      # 1B0  layers.2 .. head  240 us
        send("layers.2/add#1/bwd")         # to stage 0 (ranks 0 .. 1)  4.0 MiB  95 us
        optimizer()

    def forward_1(micro_batch):
        mm = aten.mm(view, t)              # layers.2.up/mm#0  (2048, 1024) S(0) R  190 us

Seconds are those that the simulator plays (`step_program.py`). A pass of several stages on one rank hands its value on
without a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.explain.bodies import Turn, bodies, optimizer_parts
from autopar.explain.graph_lines import graph_lines
from autopar.passes.graph_text import with_comment
from autopar.passes.stages.cut_stages import Crossing
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes, format_seconds
from autopar.schedules.actions import PipeAction
from autopar.simulation.priced_stages import StepGraphs
from autopar.simulation.step_program import StepProgram

NAMES: dict[Turn, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward_of_inputs",
    "W": "backward_of_weights",
    "prepare": "gather_once",
    "late": "sum_gradients",
}


class Printer:
    """Prints one rank of a group."""

    def __init__(self, plan: Plan, graphs: StepGraphs, step: StepProgram, group: int) -> None:
        self.plan, self.pipeline, self.graphs, self.step, self.group = plan, plan.staged, graphs, step, group
        self.passes = graphs.schedule.ranks[group]
        own = [graphs.of[stage] for stage in graphs.held_by(group)]
        self.bodies = {
            _name(body.turn, stage.number): body
            for stage in own
            for body in bodies(step, stage, {action.kind for action in self.passes if action.stage == stage.number})
        }
        self.optimizer_seconds = math.fsum(optimizer_parts(step, own).values())

    @property
    def step_seconds(self) -> float:
        """Of all passes, of what runs once per step and of the optimizer."""
        once = [body.seconds for body in self.bodies.values() if body.is_once_per_step]
        passes = [self.bodies[_name(action.kind, action.stage)].seconds for action in self.passes]
        return math.fsum([*once, *passes, self.optimizer_seconds])

    def lines(self, rank: int) -> Iterator[str]:
        """The schedule, then every body once."""
        held = ", ".join(f"{stage} ({self.pipeline.stages[stage].name})" for stage in self.graphs.held_by(self.group))
        yield f"# rank {rank} of {self.plan.num_ranks}, in rank group {self.group}: stages {held}"
        yield f"# {self.pipeline.schedule}, {self.plan.micro_batches} micro-batches per step"
        yield ""
        yield "def step(batch):"
        yield from self._once("prepare")
        for action in self.passes:
            yield from self._pass(action)
        yield from self._once("late")
        if self.step.program.training:
            yield with_comment("    optimizer()", format_seconds(self.optimizer_seconds))
        for name, body in self.bodies.items():
            parameter = "" if body.is_once_per_step else "micro_batch"
            yield from ("", "", with_comment(f"def {name}({parameter}):", format_seconds(body.seconds)))
            yield from (f"    {line}" for line in graph_lines(body.graph, body.stage.plan, body.inputs, body.prices))

    # the schedule

    def _once(self, turn: Turn) -> Iterator[str]:
        for name, body in self.bodies.items():
            if body.turn == turn:
                yield with_comment(f"    {name}()", f"once per step  {format_seconds(body.seconds)}")

    def _pass(self, action: PipeAction) -> Iterator[str]:
        name = _name(action.kind, action.stage)
        backward = action.kind != "F"
        crossings = [c for c in self.graphs.crossings if c.is_backward == backward and action.kind != "W"]
        yield from self._messages([c for c in crossings if c.target == action.stage], action, is_sent=False)
        what = f"{action}  {self.pipeline.stages[action.stage].name}  {format_seconds(self.bodies[name].seconds)}"
        yield with_comment(f"    {name}({action.micro_batch})", what)
        yield from self._messages([c for c in crossings if c.source == action.stage], action, is_sent=True)

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


def _name(turn: Turn, stage: int) -> str:
    return f"{NAMES[turn]}_{stage}"
