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
import math
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import autopar
from autopar.demo.gpt import GPT, GPTConfig
from autopar.runtime.kernels.inductor import CompiledPiece, PieceByPiece
from autopar.runtime.step.whole_step import WholeStep
from benchmarks.agreement import compare, loss_of, reference
from benchmarks.models import Inputs, llama
from benchmarks.plan_quality.models import mixture
from benchmarks.results import write_results

WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of a model and its batch."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    length: int

    def inputs(self, tokens: str) -> Inputs:
        """`tokens` and `labels`, (batch, length)."""
        shape = (self.batch, self.length)
        return {name: torch.randint(0, self.vocabulary, shape) for name in (tokens, "labels")}


def gpt(size: Size) -> tuple[nn.Module, Inputs]:
    """Layer norms and GELU."""
    config = GPTConfig(vocabulary=size.vocabulary, positions=size.length, width=size.width, heads=4, layers=size.layers)
    return GPT(config), size.inputs("tokens")


def grouped_llama(size: Size) -> tuple[nn.Module, Inputs]:
    """RMS norms, SwiGLU of 8/3 of the width (up to a multiple of 16), two queries per key."""
    model = llama(
        layers=size.layers, width=size.width, hidden=16 * math.ceil(size.width / 6), heads=4, kv_heads=2,
        vocabulary=size.vocabulary, positions=size.length,
    )  # fmt: skip
    return model, size.inputs("input_ids")


def experts(size: Size) -> tuple[nn.Module, Inputs]:
    """Each token goes through two of eight gated experts of twice the width, a loop in plain torch."""
    model = mixture(
        layers=size.layers, width=size.width, hidden=2 * size.width, heads=4, experts=8, chosen=2,
        vocabulary=size.vocabulary,
    )  # fmt: skip
    return model, size.inputs("x")


MODELS: Mapping[str, Callable[[Size], tuple[nn.Module, Inputs]]] = {
    "gpt": gpt, "llama": grouped_llama, "experts": experts,
}  # fmt: skip


def compilations(module: Any, inputs: Inputs) -> tuple[int, int]:
    """Compiled pieces of the step of these inputs, and how many compilations they took."""
    step, _ = module.step_for((), inputs)
    assert isinstance(step, WholeStep)
    graphs = [graph for graph in (step.forward, step.backward) if isinstance(graph, PieceByPiece)]
    found = [[call for _, call in graph.pieces if isinstance(call, CompiledPiece)] for graph in graphs]
    return sum(map(len, found)), sum(len(calls[0].made) for calls in found)


MEASURED = Size(layers=6, width=256, vocabulary=512, batch=4, length=128)


def measure(name: str, steps: int) -> dict[str, Any]:
    """The row of one model."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](MEASURED)
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
    pieces, made = compilations(ours, inputs)
    return {
        "model": name,
        "step_cpu_s": median,
        "over_eager": {which: median[which] / median["eager"] for which in median},
        "first_step_cpu_s": first,
        "compiled_pieces": pieces,
        "compilations": made,
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
