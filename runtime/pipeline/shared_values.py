"""What the rank groups of a pipeline have in common: gradients of parameters that several hold, loss and outputs.

Where rank groups are equal, the ranks at the same place of each hold the same block: they add up gradients, and hand on
results, among themselves. Where groups are unequal, the whole value travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.layouts.placement import local_shape
from autopar.plans.parallel_plan import Plan
from autopar.program import Output, Program
from autopar.runtime.parameters import from_local, full_tensor, local_block
from autopar.runtime.process_groups import ProcessGroups, rank
from autopar.runtime.step.batch_parts import BatchParts
from autopar.runtime.step.batches import output_layout
from autopar.schedules.actions import Schedule


def ranks_across(groups: ProcessGroups, members: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group over the rank groups `members`: of the ranks at each place where they are equal, else of all
    their ranks. All ranks call it; None: not a member, or the only one."""
    if len(members) == 1:
        return None
    if groups.equal:
        sets = [tuple(groups.members(m)[place] for m in members) for place in range(groups.mesh.size)]
    else:
        sets = [tuple(sorted(member for m in members for member in groups.members(m)))]
    mine = None
    for ranks in sets:
        group = dist.new_group(list(ranks))
        if rank() in ranks:
            mine = group
    return mine


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGradients:
    """across: parameter -> the processes of `ranks_across`, of this rank's parameters that other groups hold too;
    shapes: of the whole parameters."""

    groups: ProcessGroups
    plan: Plan
    across: Mapping[str, dist.ProcessGroup]
    shapes: Mapping[str, tuple[int, ...]]

    def complete(self, gradients: dict[str, torch.Tensor]) -> None:
        """Add up, in place, what the groups have of these gradients."""
        for name, group in self.across.items():
            if self.groups.equal:
                dist.all_reduce(gradients[name], group=group)
            else:
                gradients[name] = self._summed(name, gradients[name], group)

    def _summed(self, name: str, gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """By way of the whole, which one rank of each group contributes."""
        layout = self.plan.parameters[name].stored
        whole = full_tensor(from_local(gradient, self.shapes[name], layout, self.groups)).clone()
        if self.groups.place:
            whole.zero_()
        dist.all_reduce(whole, group=group)
        return local_block(whole, layout, self.groups.mesh, self.groups.place).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResults:
    """Hands loss and outputs of the stages that make them to every rank. across: all rank groups, None: there is one;
    owners: output -> the stage that makes it."""

    groups: ProcessGroups
    schedule: Schedule
    across: dist.ProcessGroup | None
    owners: Mapping[str, int]

    def everywhere(
        self, output: Output, values: Mapping[int, torch.Tensor], parts: BatchParts, axes: Sequence[int]
    ) -> torch.Tensor:
        """The local block of a result of the whole batch. values: by micro-batch, those that this rank has."""
        stage, count = self.owners[output.name], parts.micro.count
        if self.across is None:
            return parts.join(output, [values[part] for part in range(count)], axes)
        makers = [self.schedule.rank_of(stage, part) for part in range(count)]
        if len(set(makers)) == 1:
            joined = parts.join(output, [values[p] for p in range(count)], axes).contiguous() if values else None
            return self._from(makers[0], joined, output.name, _returned(parts.micro.whole, output.name), parts.plan)
        whole = _returned(parts.micro.program, output.name)
        each = [self._from(maker, values.get(p), output.name, whole, parts.plan) for p, maker in enumerate(makers)]
        return parts.join(output, each, axes).contiguous()

    def _from(self, maker: int, value: torch.Tensor | None, name: str, whole: torch.Tensor, plan: Plan) -> torch.Tensor:
        """A value of the global shape of `whole` that rank group `maker` has, as the block of this rank."""
        layout, groups = output_layout(plan, name), self.groups
        if groups.equal:
            if value is None:
                shape = local_shape(whole.shape, layout, groups.mesh, groups.coordinate)
                value = torch.empty(shape, dtype=whole.dtype, device=groups.device)
            value = value.contiguous()
            dist.broadcast(value, groups.members(maker)[groups.place], group=self.across)
            return value
        if value is None:
            found = torch.empty(whole.shape, dtype=whole.dtype, device=groups.device)
        else:
            found = full_tensor(from_local(value, whole.shape, layout, groups)).contiguous()
        dist.broadcast(found, groups.members(maker)[0], group=self.across)
        return local_block(found, layout, groups.mesh, groups.place).contiguous()


def _returned(program: Program, name: str) -> torch.Tensor:
    """The output `name` of a program, as captured."""
    index = next(i for i, output in enumerate(program.outputs) if output.name == name)
    value: torch.Tensor = program.returned[index].meta["val"]
    return value
