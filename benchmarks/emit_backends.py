"""CPU seconds of a training step per emit backend: eager, inductor, and torch.compile of the plain model.

    python -m benchmarks.emit_backends [--steps N] [--only NAME ...] [RESULT.json]

One process, one thread. All four run a forward and a backward in turn, so that a loaded machine slows all alike; a row
has the median CPU seconds of each and their ratios. first_step_cpu_s: what the first step took, compilation included
(inductor's files of earlier runs are not read, and g++ runs in this process).
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

import autopar
from autopar.demo.gpt import GPT, GPTConfig
from autopar.runtime.emit import WholeStep
from autopar.runtime.kernels.inductor import CompiledPiece, PieceByPiece
from benchmarks.agreement import compare, loss_of, reference
from benchmarks.results import write_results

VOCABULARY, BATCH, LENGTH = 512, 4, 128
WARM_UP = 3
Inputs = dict[str, torch.Tensor]


def gpt() -> tuple[nn.Module, Inputs]:
    """Six layers of width 256 with layer norms and GELU."""
    config = GPTConfig(vocabulary=VOCABULARY, positions=LENGTH, width=256, heads=4, layers=6)
    return GPT(config), _inputs("tokens")


def llama() -> tuple[nn.Module, Inputs]:
    """Six layers of width 256 with RMS norms, SwiGLU and grouped queries."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _inputs("input_ids")


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {"gpt": gpt, "llama": llama}


def _inputs(tokens: str) -> Inputs:
    return {name: torch.randint(0, VOCABULARY, (BATCH, LENGTH)) for name in (tokens, "labels")}


def measure(name: str, steps: int) -> dict[str, Any]:
    """The row of one model."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    expected = reference(model, inputs)
    eager = autopar.compile(copy.deepcopy(model), inputs)
    plan = eager.plan.with_(kernel_backend="inductor")
    ours = autopar.compile(copy.deepcopy(model), inputs, plan=plan)
    whole = copy.deepcopy(model)
    whole.compile(backend="inductor")
    modules: dict[str, nn.Module] = {
        "plain": copy.deepcopy(model),
        "eager": eager,
        "inductor": ours,
        "torch_compile": whole,
    }
    first = {which: _step(module, inputs) for which, module in modules.items()}
    for _ in range(WARM_UP):
        for module in modules.values():
            _step(module, inputs)
    seconds: dict[str, list[float]] = {which: [] for which in modules}
    for _ in range(steps):
        for which, module in modules.items():
            seconds[which].append(_step(module, inputs))
    median = {which: statistics.median(found) for which, found in seconds.items()}
    ours.zero_grad(set_to_none=True)
    agreement = compare(ours, inputs, expected)
    step, _ = ours.step_for((), inputs)
    assert isinstance(step, WholeStep)
    graphs = [graph for graph in (step.forward, step.backward) if isinstance(graph, PieceByPiece)]
    calls = [[call for _, call in graph.pieces if isinstance(call, CompiledPiece)] for graph in graphs]
    return {
        "model": name,
        "step_cpu_s": median,
        "over_eager": {which: median[which] / median["eager"] for which in median},
        "first_step_cpu_s": first,
        "compiled_pieces": sum(map(len, calls)),
        "compilations": sum(len(found[0].made) for found in calls),
        "gradient_error": agreement.gradient_error,
        "agrees": agreement.agrees,
    }


def _step(module: nn.Module, inputs: Inputs) -> float:
    """CPU seconds of a forward and a backward; compilers are children, and count."""
    module.zero_grad(set_to_none=True)
    start, children = time.process_time(), _children()
    loss_of(module(**inputs)).backward()  # type: ignore[no-untyped-call]
    return time.process_time() - start + _children() - children


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", choices=sorted(MODELS), nargs="+", default=sorted(MODELS))
    parser.add_argument("result", nargs="?", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}),
    ):
        rows = [measure(name, arguments.steps) for name in arguments.only]
    print(json.dumps(rows, indent=1))
    if arguments.result is not None:
        write_results(arguments.result, {"command": "python -m benchmarks.emit_backends", "rows": rows})


if __name__ == "__main__":
    main()
