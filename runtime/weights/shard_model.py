"""Shard a model: what one process held -> what this rank keeps, as the plan of a step says.

    absent = shard_model(model, step, optimizer, seed)

`model.head.weight` is a DTensor now, a weight on meta was drawn, the state of the optimizer lies as its parameters do,
hooks on gradients went over, and what only other stages read is left out of the tree.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._compat import share_gradient_hooks
from autopar.plans.parallel_plan import Plan
from autopar.runtime.parameters import (
    check_parameter_layouts,
    leave_out,
    mark_copies,
    rewrite_optimizer,
    shard_parameters,
    shard_tensor,
    stored_layout,
    unique_parameters,
)
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.weights.initial_weights import Sync, agree_on_weights
from autopar.runtime.weights.initialise import initialise, is_on_meta
from autopar.runtime.weights.replaced_parameters import mark_replaced
from autopar.runtime.weights.stage_gradients import mark_gradients

log = logging.getLogger(__name__)


def shard_model(
    model: nn.Module, step: Step, optimizer: torch.optim.Optimizer | None, seed: int, sync: Sync
) -> dict[str, nn.Parameter]:
    """Shard parameters and buffers of `model` in place, and the optimizer's state; returns the parameters that were
    left out, since only ranks of other stages hold them: every name with an empty tensor of its shape.

    seed: of the weights that are drawn here. sync: what becomes of weights that differ between ranks.
    Raises PlanMismatchError where the plan is none for this model, and RankMismatchError as of `agree_on_weights`.
    """
    alone = step.groups.is_alone
    plan, groups, absent = step.own_plan, step.groups, step.stage_parameters.absent
    known = unique_parameters(model).values()
    layouts = {id(parameter): stored_layout(names, plan.parameters, plan.layout_mesh) for parameter, names in known}
    gone = {id(parameter) for parameter, names in known if not absent.isdisjoint(names)}
    mine = {name: parameter for name, parameter in plan.parameters.items() if name not in absent}
    check_parameter_layouts(model, mine, plan.layout_mesh)
    stored = {name: stored_layout(names, plan.parameters, plan.layout_mesh) for _, names in known for name in names}
    agree_on_weights(model, {**stored, **plan.buffers}, absent, groups, sync)
    replaced = _initialised(model, plan, groups, seed, absent) if is_on_meta(model) else {}
    left_out = leave_out(model, absent)
    done = {id(parameter) for parameter in replaced.values()}
    replaced.update(shard_parameters(model, plan.parameters, groups, done))
    for parameter, names in known:
        if id(parameter) in replaced and share_gradient_hooks(parameter, replaced[id(parameter)]) and not alone:
            log.info("gradient hooks of %s get the reduced gradient as a DTensor from now on", names[0])
    mark_copies(model, step.stage_parameters.copies)
    if len(groups.meshes) > 1:
        mark_gradients(model)
    if optimizer is not None:
        rewrite_optimizer(optimizer, replaced, layouts, groups, gone)
    old = {*replaced, *gone}
    mark_replaced((names[0], parameter) for parameter, names in known if id(parameter) in old)
    _shard_buffers(model, plan, groups)
    return left_out


def _initialised(
    model: nn.Module, plan: Plan, groups: ProcessGroups, seed: int, absent: Collection[str]
) -> dict[int, nn.Parameter]:
    """Initial weights for a model on meta, each unit sharded as soon as it is drawn; `absent`: left empty."""

    def shard(parameter: nn.Parameter, names: Sequence[str]) -> nn.Parameter:
        if not set(names).isdisjoint(absent):
            return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        sharded = shard_tensor(parameter, stored_layout(names, plan.parameters, plan.layout_mesh), groups)
        return nn.Parameter(sharded, requires_grad=parameter.requires_grad)

    return initialise(model, shard, groups.device, seed)


def _shard_buffers(model: nn.Module, plan: Plan, groups: ProcessGroups) -> None:
    for name, layout in plan.buffers.items():
        if any(str(placement) != "R" for placement in layout):
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = shard_tensor(model.get_buffer(name), layout, groups)


def shard_state(module: nn.Module, step: Step, state: dict[str, Any], prefix: str, absent: Collection[str]) -> None:
    """Full plain tensors in a state dict of `module` become DTensors in the layout of their parameter, in place;
    `absent` ones are left out. prefix: of the module's names in it."""
    plan = step.own_plan
    for _parameter, names in unique_parameters(module).values():
        layout = stored_layout(names, plan.parameters, plan.layout_mesh)
        for name in names:
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                state[prefix + name] = shard_tensor(value, layout, step.groups)
    for name in absent:
        state.pop(prefix + name, None)
