"""What the lowering makes: of every stage of a rank its graphs, and of all of them a step.

    step = lowered_step(program, plan, rank=0)
    step.stages[0].program                local shapes and collectives, forward and backward in one graph
    step.stages[0].partition              the forward and the backward graph that run
    step.stages[0].halves                 of a stage of a pipeline: its backward in one and in two pieces

No stages is one stage, no micro-batches is one. A stage is a value that grows: each pass of `chain.py` returns it with
what that pass makes. `StageContext` is what it is made by, the same for all passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.graphs.forward_backward import Partition
from autopar.passes.stages.cut_stages import StagePrograms
from autopar.passes.stages.late_sums import CutGraph
from autopar.passes.stages.once_per_step import Prepared
from autopar.passes.stages.weight_gradients import BackwardGraphs
from autopar.plans.parallel_plan import Plan
from autopar.program import Input, MicroProgram, Program
from autopar.schedules.actions import Kind, Schedule
from autopar.schedules.folding_schedule import kept_sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageContext:
    """By what a stage is lowered. plan: of its ranks, without stages; rank: its place among them; program: of global
    shapes and one micro-batch; micro: how these make up the batch; parameters: names of those of all stages, by which
    their gradients are told from what goes to other stages."""

    number: int
    plan: Plan
    rank: int
    program: Program
    micro: MicroProgram
    parameters: frozenset[str]
    in_pipeline: bool = False
    in_stage_once: bool = False
    """What the plan says of the stage in place of `gather_once`, where there are several."""
    last_kind: Kind | None = None
    """The last pass of its backward on these ranks; None where a step leaves backward to the next one."""

    @property
    def gathers_once(self) -> bool:
        """Whether what follows from parameters alone is made once per step; a batch in one part does so anyhow, and
        in logical shards every micro-batch is summed by itself."""
        if self.in_pipeline:
            return self.in_stage_once
        return self.plan.gather_once and self.micro.count > 1 and not self.plan.shards

    @property
    def adds_up(self) -> bool:
        """Whether gradients are added up in the call, since passes of several micro-batches follow each other in it; of
        logical shards also where there is one, so that a gradient is the same whatever their number on a rank."""
        return self.in_pipeline or self.micro.count > 1 or self.plan.shards > 0

    @property
    def kept_totals(self) -> int:
        """How many sums of a gradient over micro-batches live while the next one is computed."""
        if self.plan.shards:
            return kept_sums(self.micro.count)
        return int(self.adds_up)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredStage:
    """The graphs of one stage on one rank.

    program: local shapes, forward and backward in one graph. split: that as a forward and a backward graph, at the end
    the two that run. statistics: what a micro-batch adds to statistics of the batch, as a graph of its own. prepared:
    what is made once per step of the parameters, and forward and backward without it. unreduced: backward before its
    sums were cut off and its gradients added to totals. late: backward cut before the last sums of its gradients over
    ranks: what `no_sync` holds back, and what is summed once per step where there are several micro-batches. totals: of
    the gradients, by index, those that backward adds to a total. halves: backward of a stage of a pipeline, also in two
    pieces. first: without a pipeline, what runs in place of the first forward of a step, with what is prepared, which
    it returns behind all others. last: what runs in place of the last backward (in a pipeline, where it sends nothing,
    in place of the last pass of the stage's backward: `StageContext.last_kind`), with the late sums, returning every
    total complete. ending: of a stage of a pipeline, what waits for the late sums behind all passes of the step;
    `last`, or else the `reduce` of `late` behind the last pass, then only starts them.
    """

    context: StageContext
    program: Program
    split: Partition | None = None
    statistics: fx.GraphModule | None = None
    prepared: Prepared | None = None
    unreduced: fx.GraphModule | None = None
    late: CutGraph | None = None
    totals: tuple[int, ...] = ()
    halves: BackwardGraphs | None = None
    first: fx.GraphModule | None = None
    last: fx.GraphModule | None = None
    ending: fx.GraphModule | None = None

    @property
    def number(self) -> int:
        """Of the stage, in the order of the model."""
        return self.context.number

    @property
    def plan(self) -> Plan:
        """That of its ranks, without stages."""
        return self.context.plan

    @property
    def partition(self) -> Partition:
        """The forward and the backward graph of one micro-batch."""
        assert self.split is not None, "the stage is not partitioned yet"
        return self.split

    @property
    def runs(self) -> tuple[tuple[str, fx.GraphModule, int], ...]:
        """(phase, graph, how often a step runs it) of forward and backward, where there are no several stages."""
        found = []
        for phase, every, end in (("forward", self.partition.forward, self.first),
                                  ("backward", self.partition.backward, self.last)):  # fmt: skip
            ends = [] if end is None else [(phase, end, 1)]
            times = self.context.micro.count - len(ends)
            found += ([(phase, every, times)] if times and every is not None else []) + ends
        return tuple(found)

    @property
    def sent(self) -> int:
        """How many of the gradients, the first ones, are of other things than parameters: they go to other stages."""
        gradients = [output.name for output in self.program.outputs if output.role == "gradient"]
        return len([name for name in gradients if name not in self.context.parameters])

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """Every graph that stands, by what it is for."""
        found = {"program": self.program.graph_module} if self.split is None else {"forward": self.split.forward}
        if self.split is not None and self.split.backward is not None:
            found["backward"] = self.split.backward
        if self.statistics is not None:
            found["statistics"] = self.statistics
        if self.prepared is not None:
            found["prepare"] = self.prepared.prepare
        if self.halves is not None:
            found |= {"inputs": self.halves.inputs, "weights": self.halves.weights}
        if self.late is not None:
            found |= {"unreduced": self.late.unreduced, "reduce": self.late.reduce}
        found |= {} if self.first is None else {"first": self.first}
        found |= {} if self.ending is None else {"ending": self.ending}
        return found if self.last is None else found | {"last": self.last}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredStep:
    """What the ranks that were asked for run in a step.

    stages: those that they hold, in the order of the model. cut: the whole program as stages; schedule: of all ranks.
    statistics: in a pipeline the program of the statistics of the batch, on the first of the ranks; else a stage has a
    graph of them. done: how many passes have run.
    """

    plan: Plan
    micro: MicroProgram
    ranks: tuple[int, ...]
    stages: tuple[LoweredStage, ...]
    cut: StagePrograms
    schedule: Schedule
    statistics: Program | None = None
    done: int

    @property
    def program(self) -> Program:
        """Of one micro-batch, with global shapes."""
        return self.micro.program

    @property
    def only(self) -> LoweredStage:
        """The stage of a plan without stages."""
        (stage,) = self.stages
        return stage

    @property
    def statistic_inputs(self) -> tuple[Input, ...]:
        """What the statistics of the batch are made of."""
        program = self.stages[0].program if self.statistics is None else self.statistics
        return tuple(value for value in program.inputs if value.role != "tangent")

    @property
    def statistics_graph(self) -> fx.GraphModule | None:
        """What a micro-batch adds to the statistics of the batch, of `statistic_inputs`."""
        return self.stages[0].statistics if self.statistics is None else self.statistics.graph_module
