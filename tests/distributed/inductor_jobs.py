"""Models whose graphs inductor compiles, and the job of the workers that run them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

import autopar
from autopar.demo.gpt import GPT, GPTConfig
from autopar.runtime.kernels.inductor import CompiledPiece, PieceByPiece
from benchmarks.agreement import Agreement, compare, reference
from benchmarks.zoo.registry import Inputs

VOCABULARY, WIDTH, BATCH, LENGTH = 64, 32, 8, 16


def _gpt() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=VOCABULARY, positions=LENGTH, width=WIDTH, heads=4, layers=3)
    return GPT(config), _inputs("tokens")


def _llama() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _inputs("input_ids")


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Inputs]]] = {"gpt": _gpt, "llama": _llama}


def _inputs(tokens: str) -> Inputs:
    return {name: torch.randint(0, VOCABULARY, (BATCH, LENGTH)) for name in (tokens, "labels")}


def compilations(module: Any, inputs: Inputs) -> tuple[int, int]:
    """Compiled pieces of the step of these inputs, and how many compilations they took."""
    step, _ = module.step_for((), inputs)
    graphs = [graph for graph in (step.forward, step.backward) if isinstance(graph, PieceByPiece)]
    found = [[call for _, call in graph.pieces if isinstance(call, CompiledPiece)] for graph in graphs]
    return sum(map(len, found)), sum(len(calls[0].made) for calls in found)


def in_pieces(name: str, dims: dict[str, int]) -> tuple[Agreement, int, int]:
    """Agreement of a plan whose graphs inductor compiles with the plain model; compiled pieces, and compilations."""
    model, inputs = MODELS[name]()
    plan = autopar.compile(copy.deepcopy(model), inputs, dims=dims, mode="fast").plan
    module = autopar.compile(copy.deepcopy(model), inputs, plan=plan.with_(kernel_backend="inductor"))
    return compare(module, inputs, reference(model, inputs)), *compilations(module, inputs)
