"""Moved state: a run goes from one plan to another in memory: parameters, gradients and states of the optimizer travel
between ranks, each block once, and whoever holds a tensor holds it still.

    moved = StateMover(model, absent, optimizer, after).move()         all ranks; after: a step under the other plan

A parameter stays the object that it was, its blocks are others: optimizers, schedulers and hooks know nothing of it.
With stages a rank may get parameters that it did not have, or lose some: these leave its optimizer, or enter the group
in which other ranks have them. What no plan lays out (counts of steps) every rank has of its own, and gets with a
parameter that is new to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.hardware.cluster import Cluster, MixedCluster
from autopar.layouts.index_blocks import Block, block_of
from autopar.layouts.placement import Layout, replicated
from autopar.plans.plan_value import DEVICE, HOST
from autopar.runtime.consensus import attempt_on_all, gather_from_all
from autopar.runtime.parameters import (
    from_local,
    in_memory,
    local_tensor,
    memory_of,
    reorder_group,
    set_buffer,
    set_parameter,
    stored_layout,
    unique_parameters,
)
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.weights.move_schedule import (
    Form,
    MovedState,
    block_held,
    check_memory,
    check_movable,
    check_of_every_rank,
    schedule,
)
from autopar.runtime.weights.moved_blocks import HeldBlock, move_blocks
from autopar.runtime.weights.optimizer_draws import share_draws
from autopar.runtime.weights.replaced_parameters import mark_moved, mark_replaced
from autopar.runtime.weights.shard_model import mark_parameters


def empty_block(shape: Sequence[int], dtype: torch.dtype, memory: str, groups: ProcessGroups) -> torch.Tensor:
    """Memory for a block, of `plan_value.MEMORIES`."""
    on_host = memory == HOST
    pinned = on_host and groups.device.type == "cuda"
    return torch.empty(shape, dtype=dtype, device="cpu" if on_host else groups.device, pin_memory=pinned)


_Plain: TypeAlias = Mapping[str, tuple[Any, bool]]
"""Values of the state of a parameter that no plan lays out, on the host, and whether they lay on the device."""
Carried: TypeAlias = Mapping[str, tuple[int | None, _Plain]]
"""What a rank knows of the parameters that it holds: their group of the optimizer, and plain values of their state."""
Make: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A block as the module holds it."""


@dataclass(slots=True)
class _Arrival:
    """A parameter that this rank did not have."""

    names: tuple[str, ...]
    requires_grad: bool
    block: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    states: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A parameter of the model: every name, its shape and dtype, and whether it is trained; the same on all ranks."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


_PARAMETER, _GRADIENT, _BUFFER, _STATE = "parameter ", "gradient ", "buffer ", "state "


class StateMover:
    """See the module docstring. model: sharded; absent: what this rank does not hold of it; after: under the other
    plan, of as many ranks."""

    def __init__(
        self,
        model: nn.Module,
        absent: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        after: Step,
    ) -> None:
        self._model, self._absent, self._optimizer, self._after = model, absent, optimizer, after
        self._held = dict(unique_parameters(model).items())
        self._known = _known_parameters(model, absent)
        self._arrivals: dict[str, _Arrival] = {}
        self._blocks: dict[Any, Block] = {}

    def move(self, cluster: Cluster | None = None) -> tuple[dict[str, nn.Parameter], MovedState]:
        """Move everything; all ranks call it. Returns what this rank does not hold from now on, by every name, and
        what was done. Raises ConfigurationError, before anything moves, for tensors that do not say how they lie."""
        began = time.perf_counter()
        tensors, blocks_here = attempt_on_all(self._what_is_here, "what moves")
        held = gather_from_all(blocks_here)
        forms = {name: form for found in held for name, (form, _) in found.items()}
        mine = attempt_on_all(lambda: self._all_wanted(forms), "where it goes")
        wanted = gather_from_all(mine)
        carried = gather_from_all(self._carried()) if hands_change([*held, *wanted]) else []
        per_node = None if cluster is None or isinstance(cluster, MixedCluster) else cluster.devices_per_node
        found = attempt_on_all(lambda: schedule(held, wanted, per_node), "the schedule of moves")
        blocks = {
            name: self._block(name, form, tensors[name][1] if name in tensors else None)
            for name, form in forms.items()
            if name in tensors or name in mine
        }
        tensors.clear()
        sent = move_blocks(found.tensors, blocks, found.part, self._after.groups.device)
        absent = self._settle(carried)
        return absent, found.moved(sent, time.perf_counter() - began, cluster)

    # what there is

    def _what_is_here(self) -> tuple[dict[str, tuple[Form, torch.Tensor]], dict[str, tuple[Form, Block]]]:
        """(tensors, blocks), by name."""
        tensors = dict(self._tensors())
        return tensors, {name: (form, self._block_of(tensor)) for name, (form, tensor) in tensors.items()}

    def _tensors(self) -> Iterator[tuple[str, tuple[Form, torch.Tensor]]]:
        for name, (parameter, _) in self._held.items():
            yield _PARAMETER + name, self._tensor(parameter, name, name)
            if parameter.grad is not None:
                yield _GRADIENT + name, self._tensor(parameter.grad, name, f"the gradient of {name}")
            for key, value in self._states(parameter).items():
                what = f"{key} of {name} in the optimizer"
                if isinstance(value, DTensor):
                    yield f"{_STATE}{key} {name}", self._tensor(value, name, what)
                elif not self._after.groups.is_alone:
                    check_of_every_rank(value, what)
        for name, buffer in self._model.named_buffers():
            yield _BUFFER + name, self._tensor(buffer, "", f"buffer {name}")

    def _tensor(self, tensor: torch.Tensor, owner: str, what: str) -> tuple[Form, torch.Tensor]:
        check_movable(tensor, what)
        if owner and self._is_here(owner):
            memory = memory_of(self._known[owner].names, self._after.own_plan.parameters)
            check_memory(tensor, what, memory, self._after.groups.device)
        return Form(shape=tuple(tensor.shape), dtype=tensor.dtype, owner=owner), tensor

    def _block_of(self, tensor: torch.Tensor) -> Block:
        if not isinstance(tensor, DTensor):
            return block_held(tensor)
        lies = (tuple(tensor.shape), tensor.placements, id(tensor.device_mesh))
        if lies not in self._blocks:
            self._blocks[lies] = block_held(tensor)
        return self._blocks[lies]

    def _states(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        known = self._optimizer is not None and parameter in self._optimizer.state
        return self._optimizer.state[parameter] if self._optimizer is not None and known else {}

    # how it is to lie

    def _is_here(self, owner: str) -> bool:
        return self._after.stage_parameters.absent.isdisjoint(self._known[owner].names)

    def _lies(self, name: str, form: Form) -> tuple[Layout, str]:
        """Layout and memory behind the move."""
        plan, axes = self._after.own_plan, len(self._after.groups.mesh.shape)
        if not form.owner:
            return plan.buffers.get(name.removeprefix(_BUFFER), replicated(axes)), DEVICE
        known = self._known[form.owner]
        memory = memory_of(known.names, plan.parameters)
        if form.shape != known.shape:  # a part of its state that is no block of it, such as sums of rows
            return replicated(axes), memory
        return stored_layout(known.names, plan.parameters, self._after.groups.mesh), memory

    def _all_wanted(self, forms: Mapping[str, Form]) -> dict[str, Block]:
        return {name: block for name, form in forms.items() if (block := self._wanted(name, form)) is not None}

    def _wanted(self, name: str, form: Form) -> Block | None:
        if form.owner and not self._is_here(form.owner):
            return None
        return block_of(form.shape, self._lies(name, form)[0], self._after.groups.mesh, self._after.groups.place)

    # where it goes

    def _block(self, name: str, form: Form, tensor: torch.Tensor | None) -> HeldBlock:
        layout, memory = self._lies(name, form)
        groups = self._after.groups
        make = partial(_placed, form=form, layout=layout, memory=memory, groups=groups)
        return HeldBlock(
            dtype=form.dtype,
            before=None if tensor is None else local_tensor(tensor).detach(),
            empty=partial(empty_block, dtype=form.dtype, memory=memory, groups=groups),
            take=self._taker(name, form, tensor, make),
        )

    def _taker(
        self, name: str, form: Form, tensor: torch.Tensor | None, make: Make
    ) -> Callable[[torch.Tensor | None], None]:
        if not form.owner:
            assert tensor is not None
            return partial(self._take_buffer, tensor, make)
        if not self._is_here(form.owner):
            return lambda _: self._leave(name, form.owner)
        if form.owner not in self._held:
            return partial(self._arrive, name, form.owner, make)
        parameter = self._held[form.owner][0]
        if name.startswith(_GRADIENT):
            return lambda block: setattr(parameter, "grad", None if block is None else make(block))
        assert tensor is not None or name.startswith(_STATE)
        if tensor is None:
            return partial(self._take_state, name, parameter, make)
        return lambda block: None if block is None else lay_anew(tensor, make(block))

    def _take_buffer(self, tensor: torch.Tensor, make: Make, block: torch.Tensor | None) -> None:
        """One that is whole before and behind is not touched."""
        assert block is not None
        laid = _plain_where_whole(make(block))
        if isinstance(tensor, DTensor) or isinstance(laid, DTensor):
            names = [name for name, each in self._model.named_buffers(remove_duplicate=False) if each is tensor]
            for name in names:
                set_buffer(self._model, name, laid)

    def _take_state(
        self, name: str, parameter: nn.Parameter, make: Make, block: torch.Tensor | None
    ) -> None:
        """A state that other ranks have of a parameter, and this one did not."""
        if block is not None and self._optimizer is not None:
            self._optimizer.state[parameter][_key(name)] = make(block)

    def _arrive(
        self, name: str, owner: str, make: Make, block: torch.Tensor | None
    ) -> None:
        known = self._known[owner]
        arrival = self._arrivals.setdefault(owner, _Arrival(known.names, known.requires_grad))
        assert block is not None
        if name.startswith(_PARAMETER):
            arrival.block = make(block)
        elif name.startswith(_GRADIENT):
            arrival.gradient = make(block)
        else:
            arrival.states[_key(name)] = make(block)

    def _leave(self, name: str, owner: str) -> None:
        """A parameter that has gone leaves the model and the optimizer, and so does its memory."""
        if name.startswith(_PARAMETER):
            self._take_out(*self._held.pop(owner))

    # behind the moves

    def _carried(self) -> Carried:
        """What this rank knows of its parameters."""
        if self._optimizer is None:
            return {}
        groups = {id(p): index for index, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        return {
            name: (
                groups.get(id(parameter)),
                {
                    key: _on_the_way(value)
                    for key, value in self._states(parameter).items()
                    if not isinstance(value, DTensor)
                },
            )
            for name, (parameter, _) in self._held.items()
        }

    def _settle(self, carried: Sequence[Carried]) -> dict[str, nn.Parameter]:
        """Parameters that came; returns what this rank does not hold from now on."""
        told = {name: found for each in reversed(carried) for name, found in each.items()}
        in_order = [name for name in self._known if name in self._arrivals]
        for name in in_order:
            self._bring_in(self._arrivals[name], *told.get(name, (None, {})))
        if carried and self._optimizer is not None:
            self._order_groups(self._optimizer)
        mark_parameters(self._model, self._after)
        mark_moved(self._model.parameters(), self._optimizer, hands_changed=bool(carried))
        share_draws([*(parameter for parameter, _ in self._held.values()), *self._model.parameters()])
        absent: dict[str, nn.Parameter] = {}
        for name, known in self._known.items():
            if not self._is_here(name):
                absent |= dict.fromkeys(known.names, self._absent[name] if name in self._absent else self._empty(name))
        return absent

    def _order_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Groups in the order of the model, on every rank: who goes through them by collectives meets the others."""
        order = {id(parameter): at for at, parameter in enumerate(self._model.parameters())}
        for group in optimizer.param_groups:
            places = [order.get(id(parameter), len(order)) for parameter in group["params"]]
            reorder_group(group, sorted(range(len(places)), key=places.__getitem__))

    def _empty(self, owner: str) -> nn.Parameter:
        known = self._known[owner]
        empty = torch.empty(known.shape, dtype=known.dtype, device="meta")
        return nn.Parameter(empty, requires_grad=known.requires_grad)

    def _take_out(self, parameter: nn.Parameter, names: Sequence[str]) -> None:
        for name in names:
            path, _, leaf = name.rpartition(".")
            self._model.get_submodule(path)._parameters[leaf] = None
        parameter.grad = None
        mark_replaced([(names[0], parameter)])
        if self._optimizer is not None:
            self._optimizer.state.pop(parameter, None)
            for group in self._optimizer.param_groups:
                reorder_group(group, [at for at, each in enumerate(group["params"]) if each is not parameter])

    def _bring_in(self, arrival: _Arrival, group: int | None, values: _Plain) -> None:
        assert arrival.block is not None
        parameter = nn.Parameter(arrival.block, requires_grad=arrival.requires_grad)
        parameter.grad = arrival.gradient
        for name in arrival.names:
            set_parameter(self._model, name, parameter)
        if self._optimizer is None or group is None:
            return
        into = self._optimizer.param_groups[group]
        into["params"].append(parameter)
        if "param_names" in into:
            into["param_names"].append(arrival.names[0])
        if arrival.states or values:
            device = self._after.groups.device
            own = {key: value.to(device) if on_device else value for key, (value, on_device) in values.items()}
            self._optimizer.state[parameter] = {**own, **arrival.states}


def hands_change(ranks: Sequence[Iterable[str]]) -> bool:
    """Whether ranks do not all hold the same parameters. ranks: names of what each holds before, and behind."""
    held = [{name for name in names if name.startswith(_PARAMETER)} for names in ranks]
    return any(each != held[0] for each in held)


def _on_the_way(value: Any) -> tuple[Any, bool]:
    on_device = isinstance(value, torch.Tensor) and value.device.type != "cpu"
    return (value.cpu() if on_device else value), on_device


def _known_parameters(model: nn.Module, absent: Mapping[str, nn.Parameter]) -> dict[str, _Known]:
    """First name -> what is known of a parameter, in the order of the model's tree."""
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    there = {**dict(model.named_parameters(remove_duplicate=False)), **absent}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf in module._parameters:
            name = f"{path}.{leaf}" if path else leaf
            if name in there:
                names.setdefault(id(there[name]), []).append(name)
                found[id(there[name])] = there[name]
    return {
        aliases[0]: _Known(
            names=tuple(aliases),
            shape=tuple(found[key].shape),
            dtype=found[key].dtype,
            requires_grad=found[key].requires_grad,
        )
        for key, aliases in names.items()
    }


def _key(name: str) -> str:
    """The key of a state of the optimizer."""
    return name.removeprefix(_STATE).split(" ")[0]


def _placed(block: torch.Tensor, form: Form, layout: Layout, memory: str, groups: ProcessGroups) -> torch.Tensor:
    """A block as a module holds it."""
    own = in_memory(block, memory, groups)
    return own if groups.is_alone else from_local(own, form.shape, layout, groups)


def _plain_where_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Buffers that every rank has whole are plain tensors."""
    whole = isinstance(tensor, DTensor) and all(placed.is_replicate() for placed in tensor.placements)
    return local_tensor(tensor) if whole else tensor


def lay_anew(tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Give a DTensor the block and the layout of another one, in place; what is plain is as it is to be."""
    if isinstance(tensor, DTensor) and isinstance(like, DTensor):
        tensor._local_tensor, tensor._spec = like._local_tensor, like._spec
