"""Jobs of the workers that go from one plan to another in memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import autopar
from autopar.layouts.index_blocks import block_of
from autopar.runtime.checkpoints.training_state import flat_state
from autopar.runtime.parameters import full_tensor, local_tensor
from autopar.runtime.weights import moved_blocks
from autopar.runtime.weights.move_schedule import MovedState
from tests.distributed.captured_once import compile_once, prepared_by
from tests.distributed.checkpoint_jobs import _bits, _heard, _step
from tests.distributed.models import captured_tied, tied_model, tokens


def _run(dims: dict[str, int], seed: int = 11, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = tied_model(seed=seed, dropout=0.2).to(dtype)
    module = compile_once("tied model", model, tokens(0), dims=dims)
    return module, torch.optim.AdamW(module.parameters(), lr=0.05)


def _captured(**_: Any) -> bool:
    return captured_tied(dropout=0.2)


@prepared_by(_captured)
def goes_on(path: str, dims: list[dict[str, int]]) -> dict[str, Any]:
    """Train under the first plan and move to each of the others; a run that loads the checkpoint from before a move is
    what the next step, its weights and its states must equal, bit by bit."""
    others = [_run(each, seed=5) for each in dims]
    module, optimizer = _run(dims[0])
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    same, moves = [], list[MovedState]()
    for index, (other, again) in enumerate(others):
        if index:
            moves.append(module.replan(other.plan, optimizer))
        for step in range(2):
            _step(module, optimizer, step)
        autopar.save(f"{path}-{index}", module, optimizer)
        autopar.load(f"{path}-{index}", other, again)
        same.append(_bits(module, optimizer) == _bits(other, again))
        losses = [_step(run, opt, 3) for run, opt in ((module, optimizer), (other, again))]
        same.append(losses[0] == losses[1])
        same.append(_bits(module, optimizer) == _bits(other, again))
    return {
        "same": same,
        "counted": [(each.sent_bytes, each.predicted_bytes) for each in moves],
        "all": [(each.all_bytes, each.least_bytes) for each in moves],
        "predicted seconds": [each.predicted_seconds for each in moves],
        "objects": owned == {id(parameter) for group in optimizer.param_groups for parameter in group["params"]},
    }


@prepared_by(_captured)
def there_and_back(first: dict[str, int], other: dict[str, int], spoiled: bool = False) -> dict[str, bool]:
    """Whether state and gradients are what they were, bit by bit, behind a move to another plan and back, and whether
    training goes on as in a run that never moved. spoiled: what is copied is copied upside down."""
    plan = _run(other, seed=5)[0].plan
    runs = [_run(first) for _ in range(2)]
    for module, optimizer in runs:
        for step in range(2):
            _step(module, optimizer, step)
        module(**tokens(7))["loss"].backward()
    module, optimizer = runs[0]
    with pytest.MonkeyPatch.context() as patch:
        if spoiled:
            patch.setattr(moved_blocks, "copy_part", _copied_wrong)
        module.replan(plan, optimizer)
        there = {name: full_tensor(p.grad) for name, p in module.named_parameters() if p.grad is not None}
        module.replan(runs[1][0].plan, optimizer)
    plain = {name: full_tensor(p.grad) for name, p in runs[1][0].named_parameters() if p.grad is not None}
    both = there.keys() & plain.keys() if "pp" in first else plain.keys()  # stages may be cut elsewhere
    found = {
        "gradients on the way": bool(both) and all(torch.equal(there[name], plain[name]) for name in both),
        "state": _bits(*runs[0]) == _bits(*runs[1]),
        "gradients": _grad_bits(runs[0][0]) == _grad_bits(runs[1][0]),
    }
    for _, each in runs:
        each.step()
        each.zero_grad()
    found["goes on"] = _step(*runs[0], 9) == _step(*runs[1], 9) and _bits(*runs[0]) == _bits(*runs[1])
    return found


def _copied_wrong(source: torch.Tensor, held: Any, target: torch.Tensor, wanted: Any, part: Any) -> None:
    moved_copy(source.flip(0) if source.dim() and source.shape[0] > 1 else source, held, target, wanted, part)


moved_copy = moved_blocks.copy_part


def _grad_bits(module: Any) -> dict[str, bytes]:
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: local_tensor(grad).contiguous().numpy().tobytes() for name, grad in grads.items()}


@prepared_by(_captured)
def refused(dims: dict[str, int], other: dict[str, int]) -> list[str]:
    """What is heard of a plan for another number of ranks, of gradients that wait, and of an optimizer that was left
    behind; whether the refusals changed nothing."""
    module, optimizer = _run(dims)
    plan = _run(other, seed=5)[0].plan
    _step(module, optimizer, 0)
    before = _bits(module, optimizer)
    fewer = plan.with_(mesh=type(plan.mesh)(plan.mesh.axis_names, tuple(2 * size for size in plan.mesh.shape)))
    heard = [_heard(lambda: module.replan(fewer, optimizer))]
    with module.no_sync():
        module(**tokens(1))["loss"].backward()
    heard.append(_heard(lambda: module.replan(plan, optimizer)))
    module(**tokens(1))["loss"].backward()
    optimizer.zero_grad()
    heard.append("unchanged" if {n: b for n, b in _bits(module, optimizer).items() if "random" not in n}
                 == {n: b for n, b in before.items() if "random" not in n} else "changed")  # fmt: skip
    values = next(iter(optimizer.state.values()))
    if dist.get_rank() == 1:
        values["average"] = torch.zeros(3)
    heard.append(_heard(lambda: module.replan(plan, optimizer)))
    values.pop("average", None)
    module.replan(plan)
    module(**tokens(2))["loss"].backward()
    heard.append(_heard(optimizer.step))
    return heard


@prepared_by(_captured)
def between_hands(stages: dict[str, int], whole: dict[str, int]) -> dict[str, Any]:
    """The parameters of an optimizer that goes from stages to stages, and to ranks that have all of them, as its group
    names and holds them, and what is heard of it where it did not go back along."""
    module, _ = _run(stages)
    optimizer = torch.optim.SGD(list(module.named_parameters()), lr=0.1)
    plan, before = _run(whole, seed=5)[0].plan, module.plan
    _step(module, optimizer, 0)
    module.replan(before, optimizer)
    module.replan(plan, optimizer)
    (group,) = optimizer.param_groups
    named = {id(parameter): name for name, parameter in module.named_parameters()}
    held = [named[id(parameter)] for parameter in group["params"]]
    _step(module, optimizer, 1)
    module.replan(before)
    module(**tokens(2))["loss"].backward()
    return {
        "model": list(named.values()), "held": held, "names": group["param_names"], "heard": _heard(optimizer.step)
    }  # fmt: skip


@prepared_by(_captured)
def resharded(dims: dict[str, int], other: dict[str, int]) -> list[str]:
    """Names of values that are not, bit by bit, what a module under the other plan would hold of them."""
    module, optimizer = _run(dims)
    plan = _run(other, seed=5)[0].plan
    _step(module, optimizer, 0)
    state = {name: value for name, value in flat_state(module, optimizer).items() if isinstance(value, torch.Tensor)}
    blocks = autopar.reshard(state, module.plan, plan)
    assert blocks.keys() == state.keys()
    wrong = []
    for name, value in state.items():
        whole = full_tensor(value)
        layout = next((p.stored for key, p in plan.parameters.items() if f".{key}" in name), None)
        if layout is not None and isinstance(value, DTensor):
            block = block_of(whole.shape, layout, plan.layout_mesh, dist.get_rank())
            for dim, runs in enumerate(block):
                whole = torch.cat([whole.narrow(dim, start, length) for start, length in runs], dim)
        if not torch.equal(blocks[name], whole):
            wrong.append(name)
    return wrong


@prepared_by(_captured)
def resharded_by_two_plans(dims: dict[str, int], other: dict[str, int]) -> str:
    """What is heard where ranks name different plans."""
    module, plan = _run(dims)[0], _run(other, seed=5)[0].plan
    to = plan if dist.get_rank() else module.plan
    return _heard(lambda: autopar.reshard(dict(module.named_parameters()), module.plan, to))


@prepared_by(_captured)
def infers_in_between(dims: dict[str, int], inference: dict[str, int]) -> dict[str, bool]:
    """Train, go to a plan of a forward pass alone, evaluate there as here, and train on as a run that did not."""
    runs = [_run(dims) for _ in range(2)]
    for module, optimizer in runs:
        _step(module, optimizer, 0)
    module, optimizer = runs[0]
    model = tied_model(dropout=0.2).eval()
    plan = compile_once("tied model", model, tokens(0), dims=inference).plan
    before, calls, groups = module.plan, module.calls, module._first.groups
    module.eval()
    here = module(**tokens(3))["logits"]
    module.replan(plan, optimizer)
    there = module(**tokens(3))["logits"]
    is_forward_only = not any(name.endswith("/bwd") for name in module.plan.operators)
    module.train()
    module.replan(before, optimizer)
    module.calls = calls
    same_logits = torch.allclose(here, there, rtol=1e-5, atol=1e-6)
    losses = [_step(*run, 1) for run in runs]
    return {
        "forward only": is_forward_only,
        "same processes": module._first.groups is groups,
        "logits": same_logits,
        "goes on": losses[0] == losses[1] and _bits(*runs[0]) == _bits(*runs[1]),
    }


@prepared_by(_captured)
def grows_and_shrinks(path: str, small: dict[str, int], large: dict[str, int]) -> dict[str, list[bool]]:
    """A run of two ranks goes on with four and again with two, by `autopar.reshard` and what torch has; each must equal
    a run that loads the checkpoint from before, bit by bit, behind another step, too."""
    rank = dist.get_rank()
    _processes(rank, f"{path}-1", 2)
    module, optimizer, state, plans = None, None, {}, [b""]
    if rank < 2:
        module, optimizer = _run(small)
        _step(module, optimizer, 0)
        autopar.save(f"{path}-small", module, optimizer)
        state, plans = _by_name(module, optimizer), [module.plan.to_json()]
    _processes(rank, f"{path}-2", 4)
    dist.broadcast_object_list(plans, src=0)
    few = autopar.Plan.from_json(plans[0])
    grown = _run(large, seed=5)
    _put(*grown, autopar.reshard(state, few, grown[0].plan))
    found = {"grown": _as_loaded(f"{path}-small", grown, _run(large, seed=7))}
    _step(*grown, 1)
    autopar.save(f"{path}-large", *grown)
    blocks = autopar.reshard(_by_name(*grown), grown[0].plan, few)
    _processes(rank, f"{path}-3", 2)
    if rank < 2:
        shrunk = _run(small, seed=5)
        _put(*shrunk, blocks)
        found["shrunk"] = _as_loaded(f"{path}-large", shrunk, _run(small, seed=7))
    _processes(rank, f"{path}-4", 4)
    return found


def _processes(rank: int, store: str, count: int) -> None:
    """From now on the first so many ranks are the job."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank < count:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=60)
        )


def _by_name(module: Any, optimizer: Any) -> dict[str, Any]:
    parameters = dict(module.named_parameters())
    states = {
        f"{key} of.{name}": value for name, p in parameters.items() for key, value in optimizer.state[p].items()
    }
    return {**parameters, **states}


def _put(module: Any, optimizer: Any, blocks: dict[str, Any]) -> None:
    """Blocks into the parameters of a module and the states of its optimizer."""
    for name, parameter in module.named_parameters():
        local_tensor(parameter.detach()).copy_(blocks[name])
        found = {key.partition(" ")[0]: block for key, block in blocks.items() if key.endswith(f" of.{name}")}
        optimizer.state[parameter] = {
            key: block if key == "step" else _beside(parameter, block) for key, block in found.items()
        }


def _beside(parameter: Any, block: torch.Tensor) -> torch.Tensor:
    return DTensor.from_local(
        block, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


def _as_loaded(path: str, run: tuple[Any, Any], other: tuple[Any, Any]) -> list[bool]:
    autopar.load(path, *other)
    run[0].base_seed, run[0].calls = other[0].base_seed, other[0].calls
    same = [_bits(*run) == _bits(*other)]
    return [*same, _step(*run, 3) == _step(*other, 3), _bits(*run) == _bits(*other)]
