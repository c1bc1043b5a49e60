"""Jobs of the workers: modules that run their batch in parts, beside the plain model on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.runtime.pipeline.pipeline_run import PipelineRun, named
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.distributed.models import tied_model, tokens
from tests.distributed.training_jobs import largest_error

IGNORED = -100
VOCABULARY = 32
SEQUENCE = 6


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with a padding mask and a loss over the labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=input_ids == 0)
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class GroupNormalised(nn.Module):
    """A convolution over positions and a group norm, which is told the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.mix, self.norm = nn.Conv1d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        mixed = torch.relu(self.norm(self.mix(self.embedding(input_ids).transpose(1, 2))))
        logits = self.head(mixed.transpose(1, 2))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _gpt2() -> nn.Module:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": VOCABULARY, "n_positions": SEQUENCE}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def _llama() -> nn.Module:
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(**heads, **sizes, use_cache=False))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "encoder": Encoder,
    "group norm": GroupNormalised,
}


def unevenly_labelled(seed: int, batch: int = 8) -> dict[str, torch.Tensor]:
    """Tokens with padding; most labels are ignored, all of some samples, none of others."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, VOCABULARY, (batch, SEQUENCE), generator=generator)
    labels = torch.randint(0, VOCABULARY, (batch, SEQUENCE), generator=generator)
    for sample in range(batch):
        kept = (0, 0, 2, 6, 3, 1, 6, 1)[(sample + seed) % 8]
        labels[sample, kept:] = IGNORED
        if kept in (2, 3):
            input_ids[sample, 4:] = 0
    return {"input_ids": input_ids, "labels": labels}


def _loss(output: Any) -> torch.Tensor:
    return output["loss"]


def captured(name: str, parts: int, **_: Any) -> bool:
    """Capture a model in its micro-batches."""
    return capture_once(f"{name} in parts", MODELS[name](), unevenly_labelled(0), parts=parts)


@prepared_by(captured)
def train(name: str, dims: dict[str, int] | None, parts: int, own_counts: bool = False) -> dict[str, float]:
    """Errors of loss, logits and gradients: of one call, and of two accumulated ones, scaled and clipped.

    own_counts: the mutation in which every part divides by its own number of labels.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    reference = copy.deepcopy(model)
    module = compile_once(f"{name} in parts", model, unevenly_labelled(0), dims=dims, micro_batches=parts)
    assert module.plan.micro_batches == parts
    undo = _divide_by_own_counts() if own_counts else lambda: None
    try:
        errors = _errors(module, reference)
    finally:
        undo()
    return errors


def _errors(module: autopar.ParallelModule, reference: nn.Module) -> dict[str, float]:
    output, plain = module(**unevenly_labelled(0)), reference(**unevenly_labelled(0))
    assert output["logits"].requires_grad, "a gradient that reaches them must be refused, not lost"
    errors = {
        "loss": abs(float(_loss(output).detach()) - float(_loss(plain).detach())),
        "logits": float((module.full(output["logits"]) - plain["logits"]).detach().abs().max()),
    }
    _loss(output).backward()
    _loss(plain).backward()
    errors["gradients"] = largest_error(module, reference)
    for used in (module, reference):
        used.zero_grad()
        for seed in (1, 2):
            (_loss(used(**unevenly_labelled(seed))) * 64.0).backward()
    errors["accumulated and scaled"] = largest_error(module, reference)
    ours = autopar.clip_grad_norm_(module.parameters(), 0.1)
    plain_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    errors["norm"] = abs(float(ours) - float(plain_norm)) / float(plain_norm)
    errors["clipped"] = largest_error(module, reference)
    with torch.no_grad():
        loss = _loss(module(**unevenly_labelled(3)))
        assert not loss.requires_grad
        errors["no_grad"] = abs(float(loss) - float(_loss(reference(**unevenly_labelled(3)))))
    return errors


def _divide_by_own_counts() -> Callable[[], None]:
    """The mutation: parts do not see the statistics of the whole batch but their own."""
    forward = PipelineRun._forward

    def mutated(self: PipelineRun, action: Any, *rest: Any) -> None:
        step: Any = self.step
        graph, inputs = step.statistics
        values = named(step.bound_inputs, self.bind(action.micro_batch))
        values |= {name: torch.zeros_like(value) for name, value in self.whole_statistics.items()}
        found = step.calls.of(graph)([values[value.name] for value in inputs])
        self.whole_statistics = dict(zip(self.whole_statistics, found, strict=True))
        forward(self, action, *rest)

    PipelineRun._forward = mutated  # type: ignore[method-assign]

    def undo() -> None:
        PipelineRun._forward = forward  # type: ignore[method-assign]

    return undo


def local_parts(dims: dict[str, int], parts: int) -> float:
    """Gradient error when each rank passes its own samples, which micro-batches cut again."""
    model = tied_model()
    reference = copy.deepcopy(model)
    module = compile_once("tied model", model, tokens(0), dims=dims, batch="local", micro_batches=parts)
    index, count = module.data_shard()
    part = {name: tensor.chunk(count)[index] for name, tensor in tokens(0).items()}
    output, plain = module(**part), reference(**tokens(0))
    output["loss"].backward()
    plain["loss"].backward()
    logits = float((module.full(output["logits"]) - plain["logits"]).abs().max())
    return max(largest_error(module, reference), logits)


def held_then_parts(dims: dict[str, int]) -> float:
    """Gradient error of a whole batch inside no_sync() and a batch in parts outside."""
    model = tied_model()
    reference = copy.deepcopy(model)
    module = compile_once("tied model", model, tokens(0), dims=dims, micro_batches=2)
    with module.no_sync():
        module(**tokens(1, batch=4))["loss"].backward()
    module(**tokens(0))["loss"].backward()
    reference(**tokens(1, batch=4))["loss"].backward()
    reference(**tokens(0))["loss"].backward()
    return largest_error(module, reference)


def dropout_losses(dims: dict[str, int] | None, parts: int) -> list[float]:
    """Losses of three steps with dropout and the seed 7."""
    model = tied_model(dropout=0.5)
    torch.manual_seed(7)
    module = compile_once("tied model", model, tokens(0), dims=dims, micro_batches=parts)
    return [float(module(**tokens(0))["loss"].detach()) for _ in range(3)]


def verified(dims: dict[str, int], parts: int, dropout: float) -> float:
    """Worst gradient error that verify reports."""
    module = compile_once("tied model", tied_model(dropout=dropout), tokens(0), dims=dims, micro_batches=parts)
    result = autopar.verify(module, tokens(1))
    return result.gradients[result.worst]
