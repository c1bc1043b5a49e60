"""Jobs of the workers whose plans place experts."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import autopar
from autopar.layouts.placement import Layout, Mesh, Shard, in_order
from autopar.plans.parallel_plan import Plan
from autopar.runtime.parameters import from_local, full_tensor, local_block
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.weights import moved_experts
from tests.passes.kernels.test_dispatched_rows import BATCH, CHOSEN, TOKENS, WIDTH, Chosen

ORDER = (1, 5, 0, 3, 6, 7, 2, 4)


def batch(seed: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    real: dict[str, Any] = {"dtype": torch.float64, "generator": draws}
    return {
        "x": torch.randn(BATCH, TOKENS, WIDTH, **real),
        "weights": torch.rand(BATCH, TOKENS, CHOSEN, **real),
        "chosen": torch.randint(8, (BATCH, TOKENS, CHOSEN), generator=draws),
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return Chosen(8).double()


def planned(dims: dict[str, int], **options: Any) -> Plan:
    """As rank 0 plans it."""
    cluster, found = f"{dist.get_world_size()} cpu", [b""]
    if dist.get_rank() == 0:
        ways = {"ep": "dispatch"} if "ep" in dims else {}
        found = [autopar.plan(model(), batch(0), cluster=cluster, dims=dims, mode="fast", **ways, **options,
            with_baselines=False).to_json()]
    dist.broadcast_object_list(found)
    return Plan.from_json(found[0])


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[dict[str, Tensor]]:
    """Loss and every gradient of every step, whole."""
    found = []
    for step in steps:
        optimizer.zero_grad()
        loss = module(**batch(step))
        loss.backward()
        grads = {name: full_tensor(each.grad).clone() for name, each in module.named_parameters()}  # type: ignore[arg-type]
        found.append({**grads, "loss": loss.detach().clone()})
        optimizer.step()
    return found


def values(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and the optimizer's moments, whole."""
    named = dict(module.named_parameters())
    moments = {f"{name} {key}": full_tensor(optimizer.state[each][key])
               for name, each in named.items() for key in ("exp_avg", "exp_avg_sq")}  # fmt: skip
    return {**{name: full_tensor(each.detach()).clone() for name, each in named.items()}, **moments}


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative error of a norm."""
    assert set(found) == set(wanted)
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


def placed(dims: dict[str, int], folder: str) -> dict[str, float]:
    """What differs from one device, by what was compared: steps, values behind them, and these behind every way in
    which they are written and read, under this plan and under one of other axes."""
    module = autopar.compile(model(), batch(0), plan=planned(dims).with_(expert_order={"": ORDER}))
    optimizer, alone = adamw(module), model()
    own = adamw(alone)
    steps, wanted = train(module, optimizer, range(3)), train(alone, own, range(3))
    expected = values(alone, own)
    found = {f"step {i}": apart(*pair) for i, pair in enumerate(zip(steps, wanted, strict=True))}
    found["values"] = apart(values(module, optimizer), expected)
    weights = {name: expected[name] for name in alone.state_dict()}
    found["full_state_dict"] = apart(module.full_state_dict(), weights)
    half = {name: value[: BATCH // 2] for name, value in batch(5).items()}
    found["a smaller batch"] = apart({"": module(**half).detach()}, {"": alone(**half).detach()})
    other = autopar.compile(Chosen(8).double(), batch(0), plan=planned({"dp_shard": dist.get_world_size()}))
    again = autopar.compile(Chosen(8).double(), batch(0), plan=module.plan)
    for name, taken in (("in other dims", other), ("back", again)):
        fresh = adamw(taken)
        autopar.save(f"{folder}/{name}", module, optimizer)
        autopar.load(f"{folder}/{name}", taken, fresh)
        found[name] = apart(values(taken, fresh), expected)
        module, optimizer = taken, fresh
    module.save_weights(f"{folder}/weights")
    again.load_state_dict(model().state_dict())
    found["load_state_dict"] = apart(again.full_state_dict(), dict(model().state_dict()))
    again.load_weights(f"{folder}/weights")
    found["load_weights"] = apart(again.full_state_dict(), weights)
    found |= {f"torch {name}": error for name, error in _as_torch_reads(again, expected["up"]).items()}
    dist.barrier()
    shutil.rmtree(Path(folder), ignore_errors=True)
    return found


def _as_torch_reads(module: nn.Module, up: Tensor) -> dict[str, float]:
    held = module.get_parameter("up").detach()
    assert isinstance(held, DTensor)
    everywhere = [Replicate()] * held.device_mesh.ndim
    copied = copy.deepcopy(held)
    return {
        "full_tensor": apart({"": held.full_tensor()}, {"": up}),
        "redistribute": apart({"": held.redistribute(placements=everywhere).to_local()}, {"": up}),
        "an expert": apart({"": held[3].full_tensor()}, {"": up[3]}),
        "a copy": apart({"": copied.full_tensor()}, {"": up}),
        "a sum with a whole": apart({"": (held + DTensor.from_local(up, held.device_mesh, everywhere)).full_tensor()},
                                    {"": 2 * up}),
    }  # fmt: skip


def nested() -> float:
    """A dim in an order that both axes of a mesh split, whole again."""
    mesh, whole = Mesh(("dp_shard", "ep"), (2, 2)), torch.arange(24.0).view(8, 3)
    groups = ProcessGroups(mesh, "cpu")
    layout: Layout = in_order((Shard(0), Shard(0)), 0, ORDER)
    tensor = from_local(local_block(whole, layout, mesh, groups.place), whole.shape, layout, groups)
    return max(float((each - whole).abs().max()) for each in (tensor.full_tensor(), full_tensor(tensor + 0.0)))


def switched(dims: dict[str, int], wrong: str = "") -> dict[str, Any]:
    """Three steps, other places of experts, three steps: what differs from one device's six, and how many experts came.
    wrong: "nothing moves", or "weights alone"."""
    module = autopar.compile(model(), batch(0), plan=planned(dims))
    optimizer, alone = adamw(module), model()
    own = adamw(alone)
    wanted = train(alone, own, range(6))
    steps = train(module, optimizer, range(3))
    held = {id(each) for each in module.parameters()}
    half = {name: value[: BATCH // 2] for name, value in batch(5).items()}
    module(**half)
    loads = {"": [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]}
    with _spoiled(wrong):
        came = module.place_experts(loads, optimizer)
    assert {id(each) for each in module.parameters()} == held
    steps += train(module, optimizer, range(3, 6))
    found: dict[str, Any] = {f"step {i}": apart(*pair) for i, pair in enumerate(zip(steps, wanted, strict=True))}
    found["values"] = apart(values(module, optimizer), values(alone, own))
    found["a smaller batch"] = apart({"": module(**half).detach()}, {"": alone(**half).detach()})
    first = module.plan
    edit = first.with_(expert_order={"": ORDER})
    module.place_experts(edit, optimizer)
    found["an edit"] = apart(values(module, optimizer), values(alone, own))
    assert module.plan.expert_order == {"": ORDER}
    assert module.place_experts(edit, optimizer) == {}
    return {"errors": found, "came": came, "order": first.expert_order[""], "refused": _refused(module, edit)}


def replanned(dims: dict[str, int], other: dict[str, int]) -> dict[str, float]:
    """Two steps with placed experts, two under another plan, and two with placed experts again: what differs from one
    device's six."""
    module = autopar.compile(model(), batch(0), plan=planned(dims).with_(expert_order={"": ORDER}))
    optimizer, alone, plan = adamw(module), model(), module.plan
    own = adamw(alone)
    wanted, steps = train(alone, own, range(6)), train(module, optimizer, range(2))
    for at, to in ((2, planned(other)), (4, plan)):
        module.replan(to, optimizer)
        steps += train(module, optimizer, range(at, at + 2))
    found = {f"step {i}": apart(*pair) for i, pair in enumerate(zip(steps, wanted, strict=True))}
    return {**found, "values": apart(values(module, optimizer), values(alone, own))}


def _spoiled(wrong: str) -> Any:
    moves = moved_experts._exchange

    def some(tensor: Tensor, old: Layout, new: Layout, groups: ProcessGroups) -> None:
        if wrong == "weights alone" and isinstance(tensor, nn.Parameter):
            moves(tensor, old, new, groups)
        moved_experts._say(tensor, new, groups.mesh)

    return patch.object(moved_experts, "_exchange", some if wrong else moves)


def _refused(module: autopar.ParallelModule, edit: Plan) -> list[str]:
    """The words of the refusals."""
    asked: list[Any] = [
        edit.with_(replicated_experts={"": (0,)}),
        edit.with_(expert_order={"": (1, 0)}),
        {"nowhere": [1.0] * 8},
    ]
    found = []
    for each in asked:
        try:
            module.place_experts(each)
        except autopar.AutoparError as error:
            found.append(str(error))
    return found
