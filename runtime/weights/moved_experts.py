"""Experts change places between two steps: rows of weights, gradients and optimizer states go to their new ranks.

    edited = plan_for(plan, program, {"layers.*.experts": counts})     the same plan, experts placed for other loads
    move_experts(model, optimizer, before, after)                      before, after: steps under the two plans

An expert that stays on its rank is sent nowhere; the others go by one all-to-all for each tensor, in place, so who
holds a tensor holds it still. Parameters and states, taken whole, are those of before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._compat import DTensorSpec, resolve_group
from autopar.errors import ConfigurationError
from autopar.graphs.expert_loads import expert_counts
from autopar.layouts.placement import Layout, Mesh, Shard, local_runs
from autopar.passes.lowering.placed_experts import order_of_parameters
from autopar.plans.expert_placement import placed_experts
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import expert_ranks
from autopar.plans.plan_text import difference
from autopar.program import Program
from autopar.request.expert_load import ExpertLoad, load_shares
from autopar.runtime.parameters import local_tensor, to_torch
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.emitted_step import Step

CHOICES = ("mesh", "parameters", "operators", "inputs", "buffers", "outputs", "kernel_backend", "kernels",
           "micro_batches", "replicated_experts", "deterministic", "pipeline", "expert_capacity",
           "fingerprint")  # fmt: skip
"""What an edit of the order of experts leaves as it is."""


def plan_for(plan: Plan, program: Program, asked: Plan | ExpertLoad) -> Plan:
    """The plan with the experts of another one, or placed for a load as few moves away as may be; what is predicted is
    that of the plan given last. Raises ConfigurationError and PlanMismatchError, saying what is not an edit of `plan`,
    or cannot be placed."""
    if plan.in_stages:
        raise ConfigurationError("place_experts: stages of a pipeline keep their experts; compile under the other plan")
    if isinstance(asked, Plan):
        for name in CHOICES:
            if getattr(plan, name) != getattr(asked, name):
                raise ConfigurationError(
                    f"place_experts takes an edit of the module's plan, with another expert_order; this one differs in "
                    f"{name}:\n{_first_lines(difference(plan, asked))}"
                )
        found = asked
    else:
        found = _placed_for(plan, program, asked)
    order_of_parameters(found, program)
    return found


def _first_lines(text: str) -> str:
    return "\n".join(text.splitlines()[:8])


def _placed_for(plan: Plan, program: Program, load: ExpertLoad) -> Plan:
    counts, order = expert_counts(program.graph), dict(plan.expert_order)
    shares = load_shares(load, counts)
    for module, each in shares.items():
        ranks, copies = expert_ranks(plan, module), plan.replicated_experts.get(module, ())
        if not ranks:
            raise ConfigurationError(
                f"place_experts: rows of {module or 'the model'} travel to no rank of their expert under this plan "
                "(dims={'ep': 4}, ep='dispatch')"
            )
        travel = [0.0 if expert in copies else share for expert, share in enumerate(each)]
        order[module] = placed_experts(travel, ranks, order.get(module, ())).order
    loads = {**plan.expert_load, **shares}
    question = {**plan.question, "expert_load": {name: list(each) for name, each in loads.items()}}
    return plan.with_(expert_order=order, question=question)


def move_experts(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, before: Step, after: Step
) -> dict[str, int]:
    """Move what lies elsewhere under the plan of `after`; all ranks call it. Returns by parameter how many experts came
    to this rank. Raises ConfigurationError, before anything moves, for states that do not say where they lie."""
    moved, jobs = dict[str, int](), list[tuple[torch.Tensor, Layout, Layout]]()
    for name, parameter in model.named_parameters():
        if name in after.own_plan.parameters:
            old, new = (step.own_plan.parameters[name].stored for step in (before, after))
            if old != new:
                jobs += [(tensor, old, new) for tensor in _with_states(name, parameter, optimizer)]
                mesh, coordinate, experts = after.groups.mesh, after.groups.coordinate, parameter.shape[0]
                moved[name] = len({*_held(experts, new, mesh, coordinate)} - {*_held(experts, old, mesh, coordinate)})
    with torch.no_grad():
        for tensor, old, new in jobs:
            _exchange(tensor, old, new, after.groups)
    return moved


def _with_states(name: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """A parameter, its gradient, and what of its optimizer state has a row for every expert."""
    yield parameter
    if parameter.grad is not None:
        yield _known(parameter.grad, f"the gradient of {name}", parameter)
    for key, value in optimizer.state[parameter].items() if optimizer and parameter in optimizer.state else ():
        has_rows = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == parameter.shape[0]
        if has_rows and not _is_whole(value):
            yield _known(value, f"{key} of the optimizer's state of {name}", parameter)


def _is_whole(value: torch.Tensor) -> bool:
    """Whether every rank has all of it, in the model's order."""
    return isinstance(value, DTensor) and all(placed.is_replicate() for placed in value.placements)


def _known(tensor: torch.Tensor, what: str, parameter: torch.Tensor) -> torch.Tensor:
    lies = [p for p in getattr(parameter, "placements", ()) if getattr(p, "dim", None) == 0]
    if type(tensor) is not DTensor or [p for p in tensor.placements if getattr(p, "dim", None) == 0] != lies:
        raise ConfigurationError(
            f"place_experts: {what} ({type(tensor).__name__}) does not lie as the parameter does; save, compile under "
            "the other plan, and load"
        )
    return tensor


def _held(experts: int, layout: Layout, mesh: Mesh, coordinate: Sequence[int]) -> list[int]:
    """The experts of a rank, as they lie."""
    runs = local_runs(experts, layout, 0, mesh, coordinate)
    return [expert for start, length in runs for expert in range(start, start + length)]


def _exchange(tensor: torch.Tensor, old: Layout, new: Layout, groups: ProcessGroups) -> None:
    """Rows of dim 0 of a DTensor from an order of experts to another, in place."""
    mesh, experts, block = groups.mesh, tensor.shape[0], local_tensor(tensor)
    axes = [axis for axis, placed in enumerate(old) if isinstance(placed, Shard) and placed.dim == 0]
    peers = [_at(groups.coordinate, axes, at) for at in itertools.product(*(range(mesh.shape[axis]) for axis in axes))]
    had, gets = ([_held(experts, layout, mesh, peer) for peer in peers] for layout in (old, new))
    me = peers.index(tuple(groups.coordinate))
    sent = [[expert for expert in gets[peer] if expert in had[me]] if peer != me else [] for peer in range(len(peers))]
    came = [[expert for expert in gets[me] if expert in had[peer]] if peer != me else [] for peer in range(len(peers))]
    place = {expert: row for row, expert in enumerate(had[me])}
    index = torch.tensor([place[e] for each in sent for e in each], dtype=torch.int64, device=block.device)
    out = block.index_select(0, index).to(groups.device)
    into = out.new_empty(sum(map(len, came)), *block.shape[1:])
    name = groups.name("+".join(mesh.axis_names[axis] for axis in axes))
    dist.all_to_all_single(into, out, [*map(len, came)], [*map(len, sent)], group=resolve_group(name))
    arrived = {expert: row for row, expert in enumerate(e for each in came for e in each)}
    kept = block.clone()
    for row, expert in enumerate(gets[me]):
        block[row].copy_(into[arrived[expert]] if expert in arrived else kept[place[expert]])
    _say(tensor, new, mesh)


def _at(coordinate: Sequence[int], axes: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
    """The rank with these coordinates on some axes, and others as they are."""
    found = list(coordinate)
    for axis, position in zip(axes, at, strict=True):
        found[axis] = position
    return tuple(found)


def _say(tensor: torch.Tensor, layout: Layout, mesh: Mesh) -> None:
    """Write into a DTensor in which order its rows lie now."""
    assert isinstance(tensor, DTensor)
    cut = [isinstance(placed, Shard) and placed.dim == 0 for placed in layout]
    pairs = zip(cut, to_torch(layout, mesh), tensor.placements, strict=True)
    placements = tuple(new if has_experts else old for has_experts, new, old in pairs)
    tensor._spec = DTensorSpec(tensor.device_mesh, placements, tensor_meta=tensor._spec.tensor_meta)

