"""Shard a model: what one process held -> what this rank keeps, as the plan of a step says.

    absent = shard_model(model, step, optimizer, seed)

`model.head.weight` is a DTensor now, a weight on meta was drawn, the state of the optimizer lies as its parameters do,
hooks on gradients went over, and what only other stages read is left out of the tree.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._compat import share_gradient_hooks
from autopar.layouts.index_blocks import Block, block_of
from autopar.layouts.placement import Layout
from autopar.plans.parallel_plan import Plan
from autopar.runtime.consensus import attempt_on_all
from autopar.runtime.parameters import (
    check_parameter_layouts,
    held_tensor,
    in_memory,
    leave_out,
    local_tensor,
    mark_copies,
    mark_in_shards,
    memory_of,
    rewrite_optimizer,
    set_buffer,
    set_parameter,
    shard_parameters,
    shard_tensor,
    stored_layout,
    unique_parameters,
)
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.weights.found_weights import FoundWeights, WantedTensor, read_blocks, wanted_tensors
from autopar.runtime.weights.initial_weights import Sync, agree_on_weights
from autopar.runtime.weights.initialise import fill_buffers, initialise, is_on_meta
from autopar.runtime.weights.optimizer_draws import OptimizerDraws
from autopar.runtime.weights.replaced_parameters import mark_replaced
from autopar.runtime.weights.stage_gradients import OF_A_PIPELINE, OF_SHARDS, mark_gradients

log = logging.getLogger(__name__)


def shard_model(
    model: nn.Module,
    step: Step,
    optimizer: torch.optim.Optimizer | None,
    seed: int,
    sync: Sync,
    weights: FoundWeights | None = None,
) -> dict[str, nn.Parameter]:
    """Shard parameters and buffers of `model` in place, and the optimizer's state; returns the parameters that were
    left out, since only ranks of other stages hold them: every name with an empty tensor of its shape.

    seed: of the weights that are drawn here. sync: what becomes of weights that differ between ranks. weights: files
    from which all of them come.
    Raises PlanMismatchError where the plan is none for this model, RankMismatchError as of `agree_on_weights`, and
    ConfigurationError where a file cannot be read.
    """
    alone = step.groups.is_alone
    plan, groups, absent = step.own_plan, step.groups, step.stage_parameters.absent
    known = unique_parameters(model).values()
    lies = {id(parameter): _stored(names, plan) for parameter, names in known}
    gone = {id(parameter) for parameter, names in known if not absent.isdisjoint(names)}
    mine = {name: parameter for name, parameter in plan.parameters.items() if name not in absent}
    check_parameter_layouts(model, mine, plan.layout_mesh)
    stored = {name: stored_layout(names, plan.parameters, plan.layout_mesh) for _, names in known for name in names}
    given = weights.tensors if weights is not None else {}
    agree_on_weights(model, {**stored, **plan.buffers}, absent, groups, sync, given)
    replaced: dict[int, nn.Parameter] = {}
    if weights is not None:
        replaced = attempt_on_all(partial(read_weights, model, step, weights), f"reading {weights.origin}")
    elif is_on_meta(model):
        replaced = _initialised(model, plan, groups, seed, absent)
    left_out = leave_out(model, absent)
    done = {id(parameter) for parameter in replaced.values()}
    replaced.update(shard_parameters(model, plan.parameters, groups, done))
    for parameter, names in known:
        if id(parameter) in replaced and share_gradient_hooks(parameter, replaced[id(parameter)]) and not alone:
            log.info("gradient hooks of %s get the reduced gradient as a DTensor from now on", names[0])
    mark_parameters(model, step)
    if optimizer is not None:
        rewrite_optimizer(optimizer, replaced, lies, groups, gone)
    old = {*replaced, *gone}
    mark_replaced((names[0], parameter) for parameter, names in known if id(parameter) in old)
    _shard_buffers(model, plan, groups)
    if not alone:
        OptimizerDraws(model.parameters(), seed)
    return left_out


def mark_parameters(model: nn.Module, step: Step) -> None:
    """Note on the parameters of a sharded model what norms and gradients must know of the plan of a step."""
    mark_copies(model, step.stage_parameters.copies)
    mark_in_shards(model, step.own_plan.shards > 0)
    in_stages = OF_A_PIPELINE if len(step.groups.meshes) > 1 else ""
    mark_gradients(model, OF_SHARDS if step.own_plan.shards else in_stages)


def _stored(names: Sequence[str], plan: Plan) -> tuple[Layout, str]:
    """How and in which memory the parameter of these names is stored."""
    return stored_layout(names, plan.parameters, plan.layout_mesh), memory_of(names, plan.parameters)


def _initialised(
    model: nn.Module, plan: Plan, groups: ProcessGroups, seed: int, absent: Collection[str]
) -> dict[int, nn.Parameter]:
    """Initial weights for a model on meta, each unit sharded as soon as it is drawn; `absent`: left empty."""

    def shard(parameter: nn.Parameter, names: Sequence[str]) -> nn.Parameter:
        if not set(names).isdisjoint(absent):
            return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        layout, memory = _stored(names, plan)
        sharded = shard_tensor(parameter, layout, groups, memory)
        return nn.Parameter(sharded, requires_grad=parameter.requires_grad)

    return initialise(model, shard, groups.device, seed)


def read_weights(model: nn.Module, step: Step, weights: FoundWeights) -> dict[int, nn.Parameter]:
    """The blocks of this rank from files; buffers are read whole, those that files do not have are computed."""
    plan, groups, absent = step.own_plan, step.groups, step.stage_parameters.absent
    fill_buffers(model, groups.device, weights.tensors)
    replaced: dict[int, nn.Parameter] = {}
    mine = [each for each in wanted_tensors(model, {}) if absent.isdisjoint(each.names)]
    for each, block in read_blocks(weights, mine, partial(_runs, step), groups.device):
        if not isinstance(each.tensor, nn.Parameter):
            for name in each.names:
                set_buffer(model, name, block)
            continue
        layout, memory = _stored(each.names, plan)
        held = held_tensor(in_memory(block, memory, groups), each.tensor.shape, layout, groups)
        replaced[id(each.tensor)] = new = nn.Parameter(held, requires_grad=each.tensor.requires_grad)
        for name in each.names:
            set_parameter(model, name, new)
    return replaced


def _runs(step: Step, wanted: WantedTensor) -> Block:
    """What this rank keeps of a parameter; all of a buffer."""
    plan, groups = step.own_plan, step.groups
    layout = stored_layout(wanted.names, plan.parameters, plan.layout_mesh)
    return block_of(wanted.tensor.shape, layout, groups.mesh, groups.place)


def _shard_buffers(model: nn.Module, plan: Plan, groups: ProcessGroups) -> None:
    for name, layout in plan.buffers.items():
        if any(str(placement) != "R" for placement in layout):
            set_buffer(model, name, shard_tensor(model.get_buffer(name), layout, groups))


def load_into(module: nn.Module, step: Step, weights: FoundWeights) -> None:
    """Give the tensors of a sharded `module` the values of files, in place; all ranks call it.

    All are read before one is changed. Raises ConfigurationError where a file cannot be read."""
    mine = wanted_tensors(module, {})
    runs = partial(_runs_of_held, step)
    blocks = attempt_on_all(
        lambda: list(read_blocks(weights, mine, runs, step.groups.device)), f"reading {weights.origin}"
    )
    with torch.no_grad():
        for each, block in blocks:
            local_tensor(each.tensor).copy_(block)


def _runs_of_held(step: Step, wanted: WantedTensor) -> Block:
    buffers = step.own_plan.buffers
    layout = next((buffers[name] for name in wanted.names if name in buffers), None)
    if layout is None or isinstance(wanted.tensor, nn.Parameter):
        return _runs(step, wanted)
    return block_of(wanted.tensor.shape, layout, step.groups.mesh, step.groups.place)


def shard_state(module: nn.Module, step: Step, state: dict[str, Any], prefix: str, absent: Collection[str]) -> None:
    """Full plain tensors in a state dict of `module` become DTensors in the layout of their parameter, in place;
    `absent` ones are left out. prefix: of the module's names in it."""
    plan = step.own_plan
    for _parameter, names in unique_parameters(module).values():
        layout, memory = _stored(names, plan)
        for name in names:
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                state[prefix + name] = shard_tensor(value, layout, step.groups, memory)
    for name in absent:
        state.pop(prefix + name, None)
