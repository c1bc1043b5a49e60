"""Resharded: the state of a run from a plan to another one in memory, also for another number of ranks.

    blocks = autopar.reshard(dict(module.named_parameters()), module.plan, other)     # all ranks of both plans call it
    blocks["head.weight"]                                                             # what this rank holds under other

Of the running processes the first `plan.num_ranks` are those of a plan: where the other one has fewer, the last ranks
only give, and where it has more, they only take. `ParallelModule.replan` moves a whole module between plans of as many
ranks, with its optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import ConfigurationError
from autopar.layouts.index_blocks import Block, block_of
from autopar.layouts.placement import Layout, Mesh, is_legal, replicated
from autopar.plans.parallel_plan import Plan
from autopar.runtime.collectives.progress import HERE
from autopar.runtime.consensus import agree_on_plan, attempt_on_all, gather_from_all
from autopar.runtime.parameters import local_tensor
from autopar.runtime.process_groups import rank, world_size
from autopar.runtime.weights.move_schedule import Form, Schedule, block_held, check_movable, schedule
from autopar.runtime.weights.moved_blocks import HeldBlock, move_blocks


def reshard(
    state: Mapping[str, Any], from_plan: Plan, to_plan: Plan, *, takes: Collection[str] | None = None
) -> dict[str, Any]:
    """What this rank holds of `state` under `to_plan`, by name: plain tensors, the blocks of its layouts, in memory of
    their own. All ranks of both plans call it, at once.

    state: name -> a DTensor as a module under `from_plan` holds it, a plain tensor that is whole, or plain data; names
    have that of a parameter of the plan in them (`head.weight`, `optimizer.state.head.weight.exp_avg`), whose layout
    then holds for what has its shape; all else is whole on every rank. Ranks that `from_plan` does not have pass {}.
    takes: the names that this rank is to hold, where `to_plan` has stages; default: all.

    Raises ConfigurationError on every rank, before anything is sent: for ranks that are not there, names without a
    place, and plans that place experts, whose layouts follow from the program (`ParallelModule.replan`); and
    RankMismatchError where ranks name different plans.
    """
    with HERE.inside("reshard"):
        found, blocks, plain = _scheduled(state, from_plan, to_plan, takes)
        results: dict[str, Any] = {}
        mine = {name: _held_block(name, form, state.get(name), results) for name, form in blocks.items()}
        move_blocks(found.tensors, mine, found.part, _device())
        return results | plain


def _scheduled(
    state: Mapping[str, Any], from_plan: Plan, to_plan: Plan, takes: Collection[str] | None
) -> tuple[Schedule, dict[str, Form], dict[str, Any]]:
    """(who sends what, the tensors that this rank has or gets, the plain data that it gets)."""
    attempt_on_all(lambda: _check(state, from_plan, to_plan, takes), "what is resharded")
    for plan in (from_plan, to_plan):
        agree_on_plan(plan)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    held = gather_from_all(attempt_on_all(lambda: _held(tensors, to_plan), "what is resharded"))
    rest = gather_from_all({name: value for name, value in state.items() if name not in tensors})
    forms = {name: form for found in reversed(held) for name, (form, _) in found.items()}
    takes_part = rank() < to_plan.num_ranks
    named = [name for name in forms if takes is None or name in takes] if takes_part else []
    mine = attempt_on_all(lambda: {name: _wanted(name, forms, to_plan) for name in named}, "where tensors go")
    wanted = gather_from_all(mine)
    found = attempt_on_all(lambda: schedule(held, wanted, None), "the schedule of moves")
    data = {name: value for values in reversed(rest) for name, value in values.items()}
    plain = {name: value for name, value in data.items() if takes_part and (takes is None or name in takes)}
    return found, {name: forms[name] for name in forms if name in tensors or name in mine}, plain


def _check(state: Mapping[str, Any], from_plan: Plan, to_plan: Plan, takes: Collection[str] | None) -> None:
    most = max(from_plan.num_ranks, to_plan.num_ranks)
    if world_size() < most:
        raise ConfigurationError(
            f"reshard: plans of {from_plan.num_ranks} and {to_plan.num_ranks} ranks, and {world_size()} processes are "
            f"running: all {most} must take part"
        )
    if state and rank() >= from_plan.num_ranks:
        raise ConfigurationError(
            f"reshard: rank {rank()} passes {len(state)} values, and the plan they are of has the ranks 0 to "
            f"{from_plan.num_ranks - 1}: pass an empty dict"
        )
    if to_plan.expert_order:
        raise ConfigurationError(
            "reshard: a plan that places experts says only with its program which rank holds which: module.replan(plan)"
        )
    if to_plan.in_stages and takes is None and rank() < to_plan.num_ranks:
        raise ConfigurationError(
            "reshard: which rank of a pipeline holds which parameter follows from the program: pass takes=, the names "
            "of what this rank is to hold (those of module.state_dict() there), or take module.replan(plan)"
        )


def _held(tensors: Mapping[str, torch.Tensor], plan: Plan) -> dict[str, tuple[Form, Block]]:
    """Names of tied parameters have one owner: that of one of them which the plan knows."""
    owners: dict[int, str] = {}
    for name, tensor in tensors.items():
        check_movable(tensor, f"reshard: {name}")
        owners[id(tensor)] = owners.get(id(tensor)) or _owner(name, plan)
    return {
        name: (Form(shape=tuple(tensor.shape), dtype=tensor.dtype, owner=owners[id(tensor)]), block_held(tensor))
        for name, tensor in tensors.items()
    }


def _owner(name: str, plan: Plan) -> str:
    """The parameter of the plan whose name stands in another name, the longest; "" where there is none."""
    return next((part for part in _parts(name) if part in plan.parameters), "")


def _parts(name: str) -> Iterator[str]:
    """Neighbouring words of a dotted name, the longest first."""
    words = name.split(".")
    for length in range(len(words), 0, -1):
        yield from (".".join(words[at : at + length]) for at in range(len(words) - length + 1))


def _wanted(name: str, forms: Mapping[str, Form], plan: Plan) -> Block:
    if name not in forms:
        raise ConfigurationError(f"reshard: takes {name}, which no rank passes")
    group = plan.group_of(rank())
    own = plan.on_group(group)
    form = forms[name]
    layout = replicated(len(own.mesh.shape))
    if form.owner and _has_shape_of_owner(form, forms, own.parameters[form.owner].stored, own.mesh):
        layout = own.parameters[form.owner].stored
    return block_of(form.shape, layout, own.mesh, rank() - plan.rank_groups[group].first_rank)


def _has_shape_of_owner(form: Form, forms: Mapping[str, Form], layout: Layout, mesh: Mesh) -> bool:
    """Whether the value lies as its parameter; where the parameter is not there, whether it can."""
    shapes = {each.shape for key, each in forms.items() if key == form.owner or key.endswith(f".{form.owner}")}
    if shapes:
        return form.shape in shapes
    return bool(form.shape) and is_legal(form.shape, layout, mesh)


def _held_block(name: str, form: Form, tensor: torch.Tensor | None, results: dict[str, Any]) -> HeldBlock:
    block = None if tensor is None else local_tensor(tensor).detach()
    device = _device() if block is None else block.device
    return HeldBlock(
        dtype=form.dtype,
        before=block,
        empty=partial(torch.empty, dtype=form.dtype, device=device),
        take=partial(_keep, name, block, results),
    )


def _keep(name: str, before: torch.Tensor | None, results: dict[str, Any], block: torch.Tensor | None) -> None:
    if block is not None:
        results[name] = block.clone() if block is before else block


def _device() -> torch.device:
    """Of messages."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

