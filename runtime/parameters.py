"""Parameters: full tensors -> DTensors in the layout that the plan stores them in.

    shard_tensor(weight, (Shard(0), Replicate()), groups)     # keeps this rank's rows

Layouts cross the DTensor boundary here and only here. `Shard(dim, split=n)` becomes torch's strided shard, whose split
factor counts only the blocks that are left after the axes before it have cut the dim. Zigzag order, which DTensor does
not know, is a strided shard to it, whose whole is turned behind it (`zigzag_cuts`); parameters never lie so. Those
whose experts a plan places lie in an order of their own (`ordered_shards.py`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar._compat import DTensorSpec, StridedShard, dtensor
from autopar.errors import PlanMismatchError
from autopar.layouts.ordered_shards import factor_of, order_behind
from autopar.layouts.placement import (
    Layout,
    Mesh,
    Partial,
    Shard,
    format_layout,
    is_legal,
    local_runs,
    replicated,
    uneven_pieces,
)
from autopar.plans.plan_value import DEVICE, HOST, ParameterPlan
from autopar.runtime.process_groups import ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Which parameters a rank of a pipeline holds. absent: names of those that only other stages read; copies: name ->
    the number of rank groups that hold it, where that is not one."""

    absent: frozenset[str] = frozenset()
    copies: Mapping[str, int] = field(default_factory=dict)


_COPIES = "autopar_stage_copies"


def mark_copies(model: nn.Module, copies: Mapping[str, int]) -> None:
    """Note on every parameter how many rank groups of a pipeline hold it."""
    for parameter in model.parameters():
        setattr(parameter, _COPIES, 1)
    for name, count in copies.items():
        setattr(model.get_parameter(name), _COPIES, count)


def stage_copies(parameter: torch.Tensor) -> int:
    """How many rank groups of a pipeline hold the parameter, each with the same values."""
    return int(getattr(parameter, _COPIES, 1))


_IN_SHARDS = "autopar_in_logical_shards"


def mark_in_shards(model: nn.Module, in_shards: bool) -> None:
    """Note on every parameter whether its gradient has equal bits on any number of processes."""
    for parameter in model.parameters():
        setattr(parameter, _IN_SHARDS, in_shards)


def is_in_shards(parameter: torch.Tensor) -> bool:
    """Whether a norm of its gradient must not depend on the blocks that ranks hold."""
    return getattr(parameter, _IN_SHARDS, False)


def to_torch(layout: Layout, mesh: Mesh) -> tuple[TorchPlacement, ...]:
    """The layout as placements of torch.distributed.tensor."""
    return tuple(_placement(layout, axis, mesh) for axis in range(len(layout)))


def _placement(layout: Layout, axis: int, mesh: Mesh) -> TorchPlacement:
    placement = layout[axis]
    if isinstance(placement, Shard) and placement.order:
        is_inner = any(isinstance(p, Shard) and p.dim == placement.dim for p in layout[:axis])
        factor = factor_of(placement.order)
        return TorchShard(placement.dim) if is_inner else StridedShard(placement.dim, split_factor=factor)
    if isinstance(placement, Partial):
        return TorchPartial(placement.op)
    if not isinstance(placement, Shard):
        return TorchReplicate()
    outer = [
        mesh.shape[other]
        for other, before in enumerate(layout[:axis])
        if isinstance(before, Shard) and before.dim == placement.dim and before.split < placement.split
    ]
    blocks = placement.split // math.prod(outer)
    return TorchShard(placement.dim) if blocks <= 1 else StridedShard(placement.dim, split_factor=blocks)


def local_block(tensor: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """The block of a full `tensor` that `rank` holds; a view wherever no dim is strided."""
    coordinate = mesh.coordinate(rank)
    for dim in sorted({p.dim for p in layout if isinstance(p, Shard)}):
        runs = local_runs(tensor.shape[dim], layout, dim, mesh, coordinate)
        pieces = [tensor.narrow(dim, start, length) for start, length in runs]
        tensor = pieces[0] if len(pieces) == 1 else _joined(tensor, pieces, dim)
    return tensor


def _joined(tensor: torch.Tensor, pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(list(pieces), dim) if pieces else tensor.narrow(dim, 0, 0)


def from_local(local: torch.Tensor, shape: Sequence[int], layout: Layout, groups: ProcessGroups) -> DTensor:
    """The DTensor of global `shape` whose block on this rank is `local`. Differentiable.

    Every gradient of every step is made so. Without autograd, a spec that was made before is taken again: 4 us instead
    of 45 on one core of an EPYC.
    """
    if local.requires_grad and torch.is_grad_enabled():
        return _made(local, shape, layout, groups)
    known = _specs.setdefault(groups, {})
    key = (tuple(shape), layout, local.dtype)
    if key not in known:
        described = torch.empty_like(local, device="meta")  # torch moves blocks that lie on the host to the device
        known[key] = _made(described, shape, layout, groups)._spec
    return dtensor(local.detach() if local.requires_grad else local, known[key])


_specs: weakref.WeakKeyDictionary[ProcessGroups, dict[Any, DTensorSpec]] = weakref.WeakKeyDictionary()
"""By global shape, layout and dtype."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The block of a DTensor on this rank, without autograd; other tensors as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _made(local: torch.Tensor, shape: Sequence[int], layout: Layout, groups: ProcessGroups) -> DTensor:
    return DTensor.from_local(
        local,
        groups.device_mesh,
        to_torch(layout, groups.mesh),
        run_check=False,
        shape=torch.Size(shape),
        stride=_contiguous_strides(shape),
    )


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def held_tensor(local: torch.Tensor, shape: Sequence[int], layout: Layout, groups: ProcessGroups) -> torch.Tensor:
    """As `from_local`, as a module holds it: one process alone holds plain tensors."""
    return local if groups.is_alone else from_local(local, shape, layout, groups)


def shard_tensor(
    tensor: torch.Tensor, layout: Layout, groups: ProcessGroups, stored_on: str = DEVICE
) -> torch.Tensor:
    """What the rank holds of the full `tensor`, which every rank has: an own copy of its block, in a memory."""
    block = local_block(tensor.detach(), layout, groups.mesh, groups.place)
    own = in_memory(block.clone(memory_format=torch.contiguous_format), stored_on, groups)
    return held_tensor(own, tensor.shape, layout, groups)


def in_memory(block: torch.Tensor, stored_on: str, groups: ProcessGroups) -> torch.Tensor:
    """A block in a memory of `plan_value.MEMORIES`: as it is where it lies there."""
    if stored_on != HOST:
        return block.to(groups.device)
    on_host = block.to("cpu")
    return on_host.pin_memory() if groups.device.type == "cuda" else on_host


def check_parameter_layouts(model: nn.Module, plans: Mapping[str, ParameterPlan], mesh: Mesh) -> None:
    """Raises PlanMismatchError for parameters of the plan that the model lacks, and for layouts that cannot be."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    unknown = sorted(plans.keys() - shapes.keys())
    if unknown:
        raise PlanMismatchError(
            f"the plan is for another model: {_some(unknown)} of the plan are not in the model; plan this model again"
        )
    for name, plan in plans.items():
        fits = len(plan.stored) == len(mesh.shape) and is_legal(shapes[name], plan.stored, mesh)
        if not fits or uneven_pieces(shapes[name], plan.stored, mesh):
            raise PlanMismatchError(
                f"parameter {name} of shape {tuple(shapes[name])} cannot be stored as {format_layout(plan.stored)} on "
                f"mesh {mesh.shape}: a sharded dim needs an element per rank, a strided one must divide evenly"
            )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) or "none"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor on every rank, without autograd; a plain tensor as it is.

    torch 2.13 puts the blocks of a dim that two axes split strided together in a wrong order, so these are summed.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if sum(isinstance(placement, StridedShard) for placement in tensor.placements) < 2:
        whole: torch.Tensor = tensor.full_tensor().detach()
        return whole
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    if all(c == 0 for c, p in zip(coordinate, tensor.placements, strict=True) if p.is_replicate()):
        places = [_global_indices(tensor, dim, coordinate) for dim in range(tensor.dim())]
        whole[torch.meshgrid(*places, indexing="ij")] = tensor._local_tensor.detach()
    for axis in range(tensor.device_mesh.ndim):
        dist.all_reduce(whole, group=tensor.device_mesh.get_group(axis))
    return whole


def whole_tensor(tensor: DTensor) -> torch.Tensor:
    """The whole of a DTensor on every rank, differentiable where its gradient is wanted."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return full_tensor(tensor)
    whole: torch.Tensor = tensor.full_tensor()
    return whole


def block_of(tensor: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """What the rank holds of `whole` where it is laid out as `tensor` is."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for dim in range(tensor.dim()):
        whole = whole.index_select(dim, _global_indices(tensor, dim, coordinate))
    return whole


def _global_indices(tensor: DTensor, dim: int, coordinate: Sequence[int]) -> torch.Tensor:
    """Global index along `dim` of every local element."""
    indices = torch.arange(tensor.shape[dim], device=tensor.device)
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, StridedShard) and placement.dim == dim and (order := order_behind(placement)):
            ordered = torch.tensor(order, device=tensor.device)
            indices = ordered.chunk(tensor.device_mesh.size(axis))[coordinate[axis]]
        elif isinstance(placement, StridedShard) and placement.dim == dim:
            blocks = indices.view(int(placement.split_factor), -1)
            indices = blocks.chunk(tensor.device_mesh.size(axis), 1)[coordinate[axis]].reshape(-1)
        elif isinstance(placement, TorchShard) and placement.dim == dim:
            indices = indices.chunk(tensor.device_mesh.size(axis))[coordinate[axis]]
    return indices


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRun:
    """Neighbouring elements of a dim: `start` counts in the whole tensor, `inside` in the block of the rank."""

    start: int
    inside: int
    length: int


def held_runs(tensor: DTensor, dim: int) -> list[HeldRun]:
    """What the rank holds along `dim`, as few runs as there are."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    held = _global_indices(tensor, dim, coordinate).tolist()
    begins = [place for place, index in enumerate(held) if place == 0 or index != held[place - 1] + 1]
    return [
        HeldRun(start=held[begin], inside=begin, length=end - begin)
        for begin, end in pairwise([*begins, len(held)])
    ]


def unique_parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, tuple[str, ...]]]:
    """First name -> (parameter, all its names): a tied parameter appears once."""
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    return {aliases[0]: (found[key], tuple(aliases)) for key, aliases in names.items()}


def shard_parameters(
    model: nn.Module, plans: Mapping[str, ParameterPlan], groups: ProcessGroups, done: Collection[int] = ()
) -> dict[int, nn.Parameter]:
    """Replace every parameter of `model` by what the rank holds of it; returns id(old parameter) -> new parameter.

    Tied parameters stay one. A parameter without a plan (the graph does not use it) is replicated. done: ids of those
    that were initialised in shards.
    """
    replaced: dict[int, nn.Parameter] = {}
    for parameter, names in unique_parameters(model).values():
        if id(parameter) in done:
            continue
        layout, stored_on = stored_layout(names, plans, groups.mesh), memory_of(names, plans)
        new = nn.Parameter(shard_tensor(parameter, layout, groups, stored_on), requires_grad=parameter.requires_grad)
        for name in names:
            set_parameter(model, name, new)
        replaced[id(parameter)] = new
    return replaced


def stored_layout(names: Sequence[str], plans: Mapping[str, ParameterPlan], mesh: Mesh) -> Layout:
    """Layout in which the parameter of these names is stored; replicated where no plan names it."""
    return next((plans[name].stored for name in names if name in plans), replicated(len(mesh.shape)))


def memory_of(names: Sequence[str], plans: Mapping[str, ParameterPlan]) -> str:
    """Memory in which the parameter of these names is stored; the device's where no plan names it."""
    return next((plans[name].stored_on for name in names if name in plans), DEVICE)


def leave_out(model: nn.Module, absent: Collection[str]) -> dict[str, nn.Parameter]:
    """Take the parameters that only other ranks hold out of `model`; returns meta tensors in their place, by name.

    Each name of a tied parameter is among the keys, with the same tensor.
    """
    found: dict[str, nn.Parameter] = {}
    for parameter, names in unique_parameters(model).values():
        if not set(names) & set(absent):
            continue
        empty = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad
        )
        for name in names:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = None
            found[name] = empty
    return found


def set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put `parameter` at the dotted `name`."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path) if path else model
    owner._parameters[leaf] = parameter


def set_buffer(model: nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Put `buffer` at the dotted `name`."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._buffers[leaf] = buffer


def rewrite_optimizer(
    optimizer: torch.optim.Optimizer,
    replaced: Mapping[int, nn.Parameter],
    stored: Mapping[int, tuple[Layout, str]],
    groups: ProcessGroups,
    gone: Collection[int] = (),
) -> None:
    """Point param_groups and state of `optimizer` to the new parameters; state of a parameter's shape is sharded.

    `replaced` maps id(old parameter) -> new parameter, `stored` its stored layout and memory. Parameters of other
    modules stay. gone: ids of the old parameters that only other ranks hold.
    """
    for group in optimizer.param_groups:
        reorder_group(group, [at for at, parameter in enumerate(group["params"]) if id(parameter) not in gone])
        group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]
    state = {old: values for old, values in optimizer.state.items() if id(old) not in gone}
    optimizer.state.clear()
    for old, values in state.items():
        new = replaced.get(id(old), old)
        lies = stored.get(id(old))
        optimizer.state[new] = {
            key: value if lies is None or key == "step" else _sharded_state(value, old, lies, groups)
            for key, value in values.items()
        }


def reorder_group(group: dict[str, Any], places: Sequence[int]) -> None:
    """Leave those parameters in a group of an optimizer, with their names, that stand at `places`, in their order."""
    for entry in ("params", "param_names"):
        if entry in group:
            group[entry] = [group[entry][at] for at in places]


def _sharded_state(value: Any, parameter: torch.Tensor, stored: tuple[Layout, str], groups: ProcessGroups) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        layout, memory = stored
        return shard_tensor(value, layout, groups, memory)
    return value
