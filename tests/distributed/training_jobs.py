"""Jobs of the workers: each compares a compiled module with the plain model, and returns what the test asserts."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.ops.masked import masked_gather
from autopar.passes.lowering.checks import CheckFailed, collective_order
from autopar.runtime import emit_step
from autopar.runtime.collectives import host_graphs
from autopar.runtime.consensus import attempt_on_all, from_first_rank
from autopar.runtime.kernels.named_calls import NamedGraph
from autopar.runtime.parameters import full_tensor
from tests.distributed.captured_once import compile_once, prepared_by
from tests.distributed.models import NormalisedModel, TiedModel, captured_tied, tied_model, tokens
from tests.runtime.step.emulated_recorder import EmulatedRecorder


def full_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every gradient as a plain tensor."""
    return {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def largest_error(module: nn.Module, reference: nn.Module) -> float:
    """max |dg| / |g| over all parameters, tiny gradients against the largest norm; the same ones must exist."""
    mine, plain = full_gradients(module), full_gradients(reference)
    assert mine.keys() == plain.keys(), mine.keys() ^ plain.keys()
    norms = {name: float(gradient.norm()) for name, gradient in plain.items()}
    largest = max(norms.values())
    return max(
        float((mine[n] - plain[n]).norm()) / (norm if norm > 1e-6 * largest else largest) for n, norm in norms.items()
    )


@prepared_by(captured_tied)
def train(dims: dict[str, int] | None, steps: int = 2) -> dict[str, Any]:
    """Losses, gradient error and structure of a few SGD steps beside the plain model."""
    model = tied_model()
    reference = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    keys = list(model.state_dict())
    module = compile_once("tied model", model, tokens(0), dims=dims, optimizer=torch.optim.SGD)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, reference)]
    loss_errors, gradient_errors = [], []
    for step in range(steps):
        loss, plain = module(**tokens(step))["loss"], reference(**tokens(step))["loss"]
        loss.backward()
        plain.backward()
        loss_errors.append(abs(float(loss.detach()) - float(plain.detach())))
        gradient_errors.append(largest_error(module, reference))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {
        "loss_errors": loss_errors,
        "gradient_errors": gradient_errors,
        "names": [name for name, _ in module.named_parameters()] == names,
        "keys": list(module.state_dict()) == keys,
        "dtensors": all(isinstance(parameter, DTensor) for parameter in module.parameters()),
        "tied": module.get_parameter("head.weight") is module.get_parameter("embedding.weight"),
        "meshes": len({id(parameter.device_mesh) for parameter in module.parameters()}),
        "plain_loss": type(loss) is torch.Tensor and loss.dim() == 0,
        "loss": float(loss.detach()),
        "placements": {name: list(map(str, layout)) for name, layout in module.plan.placements.items()},
    }


@prepared_by(captured_tied)
def accumulate(dims: dict[str, int], quiet: bool) -> float:
    """Gradient error of three accumulated batches, the first two inside no_sync() when `quiet`."""
    model = tied_model()
    reference = copy.deepcopy(model)
    module = compile_once("tied model", model, tokens(0), dims=dims)
    for step in range(3):
        context = module.no_sync() if quiet and step < 2 else contextlib.nullcontext()
        with context:
            module(**tokens(step))["loss"].backward()
        reference(**tokens(step))["loss"].backward()
        if quiet and step < 2:
            assert len(full_gradients(module)) < len(full_gradients(reference)), "nothing was held"
    return largest_error(module, reference)


@prepared_by(captured_tied)
def replay(dims: dict[str, int], steps: int = 5) -> dict[str, Any]:
    """Steps under replayed graphs beside steps that run: largest differences, what was recorded, replayed and said.

    Every third batch is accumulated, the one before it inside of no_sync(). gloo stands for NCCL."""
    recorder = EmulatedRecorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.api.CudaRecorder", lambda: recorder)
        patch.setattr("autopar.runtime.step.replayed_graphs.get_backend", lambda: "nccl")
        modules = [
            compile_once("tied model", tied_model(), tokens(0), dims=dims, cuda_graphs=on) for on in (True, False)
        ]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    errors, held = [], []
    for step in range(steps):
        losses = []
        for module, optimizer in zip(modules, optimizers, strict=True):
            optimizer.zero_grad()
            if step % 3 == 2:
                with module.no_sync():
                    module(**tokens(step + 10))["loss"].backward()
            losses.append(module(**tokens(step))["loss"])
            losses[-1].backward()
        errors += [abs(float(losses[0].detach()) - float(losses[1].detach())), largest_error(*modules)]
        blocks = [p.grad._local_tensor for p in modules[0].parameters() if isinstance(p.grad, DTensor)]
        held += [(block, block.clone()) for block in blocks]
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(block, then) for block, then in held), "a replay wrote over gradients of another step"
    said = modules[0]._maker.replays.said
    return {"error": max(errors), "recorded": recorder.recorded, "replayed": recorder.replayed, "said": said}


@prepared_by(captured_tied)
def clip(dims: dict[str, int]) -> list[float]:
    """Norms by the plain model, by stock clipping and by ours, and the largest gradient error after ours."""
    model = tied_model()
    reference = copy.deepcopy(model)
    module = compile_once("tied model", model, tokens(0), dims=dims)
    module(**tokens(0))["loss"].backward()
    reference(**tokens(0))["loss"].backward()
    stock = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9).full_tensor()
    ours = autopar.clip_grad_norm_(module.parameters(), 0.1)
    plain = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    return [float(plain), float(stock), float(ours), largest_error(module, reference)]


@prepared_by(captured_tied)
def other_inputs(dims: dict[str, int]) -> dict[str, float]:
    """Differences from the plain model for smaller batches, other lengths, eval mode and full tensors loaded."""
    model = tied_model()
    reference = copy.deepcopy(model)
    module = compile_once("tied model", model, tokens(0), dims=dims)
    differences = {}
    for batch, length in ((4, 6), (6, 6), (8, 9), (8, 5), (8, 10)):
        given = tokens(1, batch=batch, length=length)
        loss, plain = module(**given)["loss"], reference(**given)["loss"]
        loss.backward()
        plain.backward()
        differences[f"{batch} x {length}"] = abs(float(loss.detach()) - float(plain.detach()))
        differences[f"gradients of {batch} x {length}"] = largest_error(module, reference)
    module.eval()
    reference.eval()
    with torch.no_grad():
        logits = module.full(module(tokens(2)["tokens"])["logits"])
        differences["eval"] = float((logits - reference(tokens(2)["tokens"])["logits"]).abs().max())
        reference.scale.fill_(0.5)
        module.load_state_dict(reference.state_dict())
        logits = module.full(module(tokens(2)["tokens"])["logits"])
        differences["loaded"] = float((logits - reference(tokens(2)["tokens"])["logits"]).abs().max())
    return differences


def outside_criterion(dims: dict[str, int]) -> float:
    """Gradient error of a model that returns logits, with the criterion outside on the gathered output."""
    model = tied_model()
    reference = copy.deepcopy(model)
    module = compile_once("tied model", model, (tokens(0)["tokens"],), dims=dims)
    for used in (module, reference):
        output = used(tokens(0)["tokens"])["logits"]
        logits = module.full(output) if used is module else output
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens(0)["labels"].flatten()).backward()
    return largest_error(module, reference)


@prepared_by(captured_tied)
def local_batch(dims: dict[str, int]) -> float:
    """Gradient error when each rank passes its own part of the batch."""
    model = tied_model()
    reference = copy.deepcopy(model)
    module = compile_once("tied model", model, tokens(0), dims=dims, batch="local")
    for batch in (8, 4):
        index, count = module.data_shard()
        part = {name: tensor.chunk(count)[index] for name, tensor in tokens(0, batch=batch).items()}
        module(**part)["loss"].backward()
        reference(**tokens(0, batch=batch))["loss"].backward()
    return largest_error(module, reference)


def batch_norm(dims: dict[str, int]) -> dict[str, float]:
    """Loss, gradient and buffer differences of two training steps with a batch norm."""
    torch.manual_seed(0)
    model = NormalisedModel()
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    module = autopar.compile(model, (x, y), dims=dims)
    for _ in range(2):
        loss, plain = module(x, y), reference(x, y)
        loss.backward()
        plain.backward()
    buffers = dict(module.named_buffers())
    return {
        "loss": abs(float(loss.detach()) - float(plain.detach())),
        "gradients": largest_error(module, reference),
        "buffers": max(float((buffers[n] - b).abs().max()) for n, b in reference.named_buffers()),
    }


@prepared_by(partial(captured_tied, dropout=0.5))
def dropout_losses(dims: dict[str, int] | None) -> list[float]:
    """Losses of three steps with dropout and the seed 7."""
    model = tied_model(dropout=0.5)
    torch.manual_seed(7)
    module = compile_once("tied model", model, tokens(0), dims=dims)
    return [float(module(**tokens(0))["loss"].detach()) for _ in range(3)]


@prepared_by(captured_tied)
def optimizer_instance(dims: dict[str, int]) -> float:
    """Parameter difference after steps of an optimizer that stepped before compiling, state kept."""
    model = tied_model()
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for m, optimizer in zip((model, reference), optimizers, strict=True):
        m(**tokens(0))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    module = compile_once("tied model", model, tokens(0), dims=dims, optimizer=optimizers[0])
    for m, optimizer in zip((module, reference), optimizers, strict=True):
        m(**tokens(1))["loss"].backward()
        optimizer.step()
    mine = dict(module.named_parameters())
    return max(float((mine[n].full_tensor() - p).abs().max()) for n, p in reference.named_parameters())


def meta_model(dims: dict[str, int]) -> tuple[float, list[float]]:
    """Loss and norms of a model that was built on the meta device."""
    with torch.device("meta"):
        model = NormalisedModel()
    torch.manual_seed(3)
    module = autopar.compile(model, (torch.empty(8, 8), torch.empty(8, 4)), dims=dims)
    torch.manual_seed(5)
    loss = module(torch.randn(8, 8), torch.randn(8, 4))
    loss.backward()
    return float(loss.detach()), [float(full_tensor(p.detach()).norm()) for p in module.parameters()]


@prepared_by(captured_tied)
def verified(dims: dict[str, int] | None, dropout: float = 0.0) -> float:
    """Worst gradient error that verify reports; it must leave the module as it was."""
    module = compile_once("tied model", tied_model(dropout=dropout), tokens(0), dims=dims, verify=True)
    module(**tokens(0))["loss"].backward()
    before = full_gradients(module)
    result = autopar.verify(module, tokens(1))
    after = full_gradients(module)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return result.gradients[result.worst]


def different_models() -> str:
    """The error of ranks that build different models."""
    model = TiedModel(width=16 if dist.get_rank() == 2 else 8)
    try:
        autopar.compile(model, tokens(0))
    except autopar.RankMismatchError as error:
        return str(error)
    return ""


def failing_rank() -> str:
    """The errors of all ranks when one cannot capture."""
    batch = tokens(0)
    if dist.get_rank() == 1:
        batch["unknown"] = batch["labels"]
    try:
        autopar.compile(tied_model(), batch)
    except autopar.AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fault_on(rank: int, alone: bool) -> str:
    """The errors of all ranks when one meets a fault of ours: in what all of them do, or (alone) the first one only."""

    def action() -> bool:
        if dist.get_rank() == rank:
            raise TypeError("planted")
        return True

    try:
        (from_first_rank if alone else attempt_on_all)(action)
    except (TypeError, autopar.AutoparError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@prepared_by(captured_tied)
def other_order() -> str:
    """The errors of all ranks when one would start its collectives in another order."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(
                emit_step, "collective_order", lambda graphs: {g: o[1:] for g, o in collective_order(graphs).items()}
            )
        try:
            compile_once("tied model", tied_model(), tokens(0), dims={"dp_shard": 4})
        except CheckFailed as error:
            return str(error)
    return ""


def unmasked_gather(source: torch.Tensor, dim: int, index: torch.Tensor, start: int) -> torch.Tensor:
    """`masked_gather` without its mask: labels of other ranks find some logit of this one."""
    return source.gather(dim, (index - start).clamp(0, source.shape[dim] - 1))


@prepared_by(captured_tied)
def planted_fault(fault: str, dims: dict[str, int]) -> str:
    """What verify says of a module whose emitted graphs were spoiled; "" where it notices nothing."""
    module = compile_once("tied model", tied_model(), tokens(0), dims=dims)
    step, _ = module.step_for((), tokens(0))
    reductions = (host_graphs.all_reduce, host_graphs.all_reduce_)
    for call in (step.forward, step.backward):
        assert isinstance(call, NamedGraph)
        graph_module = call.graph_module
        for node in list(graph_module.graph.nodes):
            if fault == "maximum instead of sum" and node.target in reductions:
                node.args = (node.args[0], "max", *node.args[2:])
            in_backward = call is step.backward
            if fault == "no reduction in backward" and in_backward and node.target in reductions:
                node.replace_all_uses_with(node.args[0])
                graph_module.graph.erase_node(node)
                continue
            if fault == "no vocabulary mask" and node.target is masked_gather:
                node.target = unmasked_gather
            if fault == "gather scaled by 1.0001" and node.target is host_graphs.all_gather:
                with graph_module.graph.inserting_before(node):
                    scaled = graph_module.graph.call_function(torch.mul, (node.args[0], 1.0001))
                node.args = (scaled, *node.args[1:])
        graph_module.recompile()
    try:
        autopar.verify(module, tokens(0))
    except autopar.VerificationError as error:
        return str(error)
    return ""
