"""What the ranks of a pipeline really hold: the graphs of their stages, run in the order of a schedule.

Ranks run one after the other, with zeros for what they receive: values are wrong then, lifetimes are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.graphs.forward_backward import Partition
from autopar.ops.host_copies import PlainCopies, copies_by
from autopar.passes.lowering.chain import lowered_on
from autopar.passes.lowering.stage import LoweredStage
from autopar.passes.stages.cut_stages import StagePrograms
from autopar.passes.stages.weight_gradients import BackwardGraphs
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.schedules.actions import PipeAction
from tests.planner.lifetime_tracker import _empty, _run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    lowered: Program
    partition: Partition
    backward: BackwardGraphs
    parameters: Mapping[str, Tensor]


def held_peaks(program: Program, plan: Plan) -> list[int]:
    """Per rank, the most bytes of all storages, parameters not among them. program: of one micro-batch; plan: with
    stages of one device each."""
    step = lowered_on(program, plan, range(plan.num_ranks))
    stages, schedule = step.cut, step.schedule
    crossing = {crossing.name for crossing in stages.crossings}
    made = [_stage(stage, crossing) for stage in step.stages]
    return [_Rank(stages, made, schedule.micro_batches).peak(actions) for actions in schedule.ranks]


def _stage(stage: LoweredStage, crossing: Set[str]) -> _Stage:
    """Parts of the batch are counted with the parameters: they lie in the batch, which is there in any case."""
    assert stage.halves is not None
    held = [v for v in stage.program.inputs if v.role in ("parameter", "input") and v.name not in crossing]
    parameters = {v.name: _empty(v.shape, v.dtype) for v in held}
    return _Stage(
        lowered=stage.program, partition=stage.partition, backward=stage.halves, parameters=parameters
    )


class _KeptApart(PlainCopies):
    """Storages of the host, which no device holds: alive to the end, so that none of them comes again."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.pointers = set[int]()

    def to_host(self, source: Tensor) -> Tensor:
        self.made.append(super().to_host(source))
        self.pointers.add(self.made[-1].untyped_storage().data_ptr())
        return self.made[-1]


class _Rank:
    def __init__(self, stages: StagePrograms, made: Sequence[_Stage], micro_batches: int) -> None:
        self.stages, self.made, self.micro_batches = stages, made, micro_batches
        self.host = _KeptApart()
        self.saved: dict[tuple[int, int], list[Any]] = {}
        self.totals: dict[str, Tensor] = {}
        self.results: list[Tensor] = []

    def peak(self, actions: Sequence[PipeAction]) -> int:
        for stage in {action.stage for action in actions}:
            for output in self.made[stage].lowered.outputs:
                if output.role == "gradient" and output.name in self.stages.holders:
                    self.totals[output.name] = torch.zeros_like(self.made[stage].parameters[output.name])
        return max(max(self._act(action)) for action in actions)

    def _act(self, action: PipeAction) -> list[int]:
        stage = self.made[action.stage]
        if action.kind == "F":
            inputs: list[Any] = [
                stage.parameters[value.name] if value.name in stage.parameters else _empty(value.shape, value.dtype)
                for value in stage.lowered.inputs
                if value.role != "tangent"
            ]
            peaks, returned = self._ran(stage.partition.forward, inputs)
            names = [output.name for output in stage.lowered.outputs if output.role in ("loss", "output")]
            self.results += [returned[i] for i, name in enumerate(names) if name in self.stages.owners]
            self.saved[action[::2]] = returned[len(names) :]
            return peaks
        kept = self.saved.pop(action[::2])
        gradients = [output.name for output in stage.lowered.outputs if output.role == "gradient"]
        backward = stage.backward
        if action.kind == "W":
            return self._ran(backward.weights, kept + [self.totals[gradients[i]] for i in backward.weight_totals])[0]
        kept += [_empty(value.shape, value.dtype) for value in stage.lowered.inputs if value.role == "tangent"]
        graph, added = (
            (backward.whole, backward.totals) if action.kind == "B" else (backward.inputs, backward.input_totals)
        )
        peaks, returned = self._ran(graph, kept + [self.totals[gradients[index]] for index in added])
        if action.kind == "I":
            sent = len([name for name in gradients if name not in self.stages.holders])
            self.saved[action[::2]] = returned[sent:]
        return peaks

    def _ran(self, graph: Any, inputs: list[Any]) -> tuple[list[int], list[Any]]:
        parameters = {t.untyped_storage().data_ptr() for stage in self.made for t in stage.parameters.values()}
        outside = [value for kept in self.saved.values() for value in kept if isinstance(value, Tensor)]
        self.host.pointers = apart = parameters | {t.untyped_storage().data_ptr() for t in self.host.made}
        with copies_by("cpu", self.host):
            return _run(graph, list(inputs), apart, [*outside, *self.totals.values(), *self.results])
