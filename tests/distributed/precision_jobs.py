"""Jobs of the workers: bf16 compute from fp32 parameters."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

import autopar
from autopar.demo.gpt import GPT, GPTConfig
from autopar.runtime.collectives import host_graphs
from autopar.runtime.kernels.named_calls import NamedGraph
from autopar.runtime.step.emitted_step import Step
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.distributed.models import captured_tied, tied_model, tokens
from tests.distributed.training_jobs import full_gradients

CONFIG = GPTConfig(vocabulary=32, positions=8, width=16, heads=4, layers=2)


def gpt_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(0, CONFIG.vocabulary, (2, 8, CONFIG.positions), generator=generator)
    return drawn[0], drawn[1]


captured_in_bf16 = partial(captured_tied, precision="bf16")


def captured(**_: Any) -> bool:
    """Capture the GPT."""
    return capture_once("gpt", GPT(CONFIG), gpt_batch(0), precision="bf16")


def named(products: str) -> dict[str, dict[str, str]] | None:
    """The constraint that makes all products run so."""
    return None if products == "default" else {"*": {"implementation": products}}


@prepared_by(captured)
def train_gpt(dims: dict[str, int] | None, steps: int = 3, products: str = "default") -> dict[str, Any]:
    """Losses in bf16 and by the fp32 model, gradients of the first step, and the dtypes that training meets. products:
    the implementation of all products."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    reference = copy.deepcopy(model)
    module = compile_once(
        "gpt", model, gpt_batch(0), dims=dims, precision="bf16", optimizer=torch.optim.AdamW,
        constraints=named(products),
    )  # fmt: skip
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (module, reference)]
    losses, plain_losses = [], []
    gradients: dict[str, torch.Tensor] = {}
    plain_gradients: dict[str, torch.Tensor] = {}
    for step in range(steps):
        loss, plain = module(*gpt_batch(step)), reference(*gpt_batch(step))
        loss.backward()
        plain.backward()
        gradients = gradients or {n: g.clone() for n, g in full_gradients(module).items()}
        plain_gradients = plain_gradients or {n: g.clone() for n, g in full_gradients(reference).items()}
        losses.append(float(loss.detach()))
        plain_losses.append(float(plain.detach()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = [value for state in optimizers[0].state.values() for value in state.values()]
    return {
        "losses": losses,
        "plain_losses": plain_losses,
        "gradients": gradients,
        "plain_gradients": plain_gradients,
        "dtypes": {loss.dtype, *(p.dtype for p in module.parameters()), *(s.dtype for s in states)},
        "question": module.plan.question["precision"],
        "implementations": module.plan.implementations,
    }


@prepared_by(captured_in_bf16)
def verified(dims: dict[str, int]) -> float:
    """Worst gradient error that verify reports of a model with tied, frozen and 0-dim parameters and a buffer."""
    module = compile_once("tied model", tied_model(), tokens(0), dims=dims, precision="bf16", verify=True)
    result = autopar.verify(module, tokens(1))
    return result.gradients[result.worst]


@prepared_by(captured_in_bf16)
def accumulated(dims: dict[str, int]) -> dict[str, torch.Tensor]:
    """Gradients of two batches, the first inside no_sync()."""
    module = compile_once("tied model", tied_model(), tokens(0), dims=dims, precision="bf16")
    with module.no_sync():
        module(**tokens(0))["loss"].backward()
    module(**tokens(1))["loss"].backward()
    return full_gradients(module)


@prepared_by(captured_in_bf16)
def precision_of_a_given_plan() -> list[str | None]:
    """A plan file carries its precision to the run."""
    plan = compile_once("tied model", tied_model(), tokens(0), dims={"dp_shard": 4}, precision="bf16").plan
    module = compile_once("tied model", tied_model(), tokens(0), plan=autopar.Plan.from_json(plan.to_json()))
    return [module.precision, plan.question["precision"]]


@prepared_by(captured)
def verified_in_float8(dims: dict[str, int], *, spoiled: bool = False) -> float | str:
    """Worst gradient error of the GPT with all products in float8, or what verify says; spoiled: without the sums of
    its gradients over ranks."""
    module = compile_once("gpt", GPT(CONFIG), gpt_batch(0), dims=dims, precision="bf16",
                          constraints=named("fp8_rowwise"))  # fmt: skip
    if spoiled:
        _without_sums(module.step_for(gpt_batch(1), {})[0])
    try:
        result = autopar.verify(module, gpt_batch(1))
    except autopar.VerificationError as error:
        return str(error)
    return result.gradients[result.worst]


@prepared_by(captured_in_bf16)
def spoiled_reduction(dims: dict[str, int]) -> str:
    """What verify says of a bf16 module whose gradients miss their reduction; "" where it notices nothing."""
    module = compile_once("tied model", tied_model(), tokens(0), dims=dims, precision="bf16")
    _without_sums(module.step_for((), tokens(0))[0])
    try:
        autopar.verify(module, tokens(0))
    except autopar.VerificationError as error:
        return str(error)
    return ""


def _without_sums(step: Step) -> None:
    """Take the sums over ranks out of the backward graph of a step."""
    assert isinstance(step.backward, NamedGraph)
    backward = step.backward.graph_module
    for node in list(backward.graph.nodes):
        if node.target in (host_graphs.all_reduce, host_graphs.all_reduce_):
            node.replace_all_uses_with(node.args[0])
            backward.graph.erase_node(node)
    backward.recompile()
