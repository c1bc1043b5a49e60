"""The largest models of one device and its host, on paper.

    python -m benchmarks.offload_paper --only gpt-13b --output FILE

GPT and Llama (bf16 weights, gradients and moments of AdamW: 8 bytes a parameter) with `offload="all"`: the plan, its
peak, what lies on the host, tokens per second. Beside ZeRO-Offload's claim (13 B on one V100 of 32 GB, over 30 TFLOP/s:
fp16 weights, fp32 masters and moments), with its sizes, and on one H100 of 80 GB with 1 TB of host. Shapes are of
published models, cut to a number of layers that fills the host; planner seconds grow with layers.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from autopar.capture import Captures
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.planner.planning import make_plan
from autopar.questions import capture_example
from autopar.request import Request
from autopar.request.search_mode import Mode
from autopar.simulation.step_program import StepProgram
from benchmarks.fake_cuda.cases import OPTIMIZER
from benchmarks.long_contexts import made, waiting
from benchmarks.models import LossOnly, gpt2, llama, token_inputs
from benchmarks.results import write_results

HOST_BYTES = 10**12
"""Of the host beside one H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """build: the model on the current default device; host_bytes: of the node; None: as the preset says."""

    build: Callable[[], nn.Module]
    vocabulary: int
    batch: int
    tokens: int
    cluster: str
    host_bytes: int | None = HOST_BYTES

    def cluster_of(self) -> Cluster:
        """One device, and the host of its node."""
        cluster = Cluster.parse(self.cluster)
        assert cluster.host is not None
        if self.host_bytes is None:
            return cluster
        return replace(cluster, host=replace(cluster.host, memory_bytes=self.host_bytes))


def _gpt(layers: int, width: int) -> Callable[[], nn.Module]:
    return partial(gpt2, layers=layers, width=width, heads=width // 128, vocabulary=50304, positions=2048)


def _llama(layers: int, width: int, hidden: int) -> Callable[[], nn.Module]:
    return partial(
        llama, layers=layers, width=width, hidden=hidden, heads=width // 128, kv_heads=8, vocabulary=128256,
        positions=8192,
    )  # fmt: skip


SETTINGS: Mapping[str, Setting] = {
    "gpt-13b, V100": Setting(
        build=_gpt(65, 4096), vocabulary=50304, batch=4, tokens=1024, cluster="1 DGX-2", host_bytes=None
    ),
    "gpt-13b": Setting(build=_gpt(65, 4096), vocabulary=50304, batch=16, tokens=1024, cluster="1 H100-SXM"),
    "gpt, layers of 16384": Setting(
        build=_gpt(32, 16384), vocabulary=50304, batch=16, tokens=2048, cluster="1 H100-SXM"
    ),
    "llama-3-70b": Setting(
        build=_llama(80, 8192, 28672), vocabulary=128256, batch=4, tokens=8192, cluster="1 H100-SXM"
    ),
    "llama, layers of 405b": Setting(
        build=_llama(32, 16384, 53248), vocabulary=128256, batch=4, tokens=8192, cluster="1 H100-SXM"
    ),
}


def row(name: str, layers: int | None, mode: Mode) -> dict[str, Any]:
    """The plan of a setting in figures; or why there is none."""
    asked, began = SETTINGS[name], time.process_time()
    with torch.device("meta"):
        model = asked.build().bfloat16().train()
    cut(model, layers)
    parameters = sum(each.numel() for each in model.parameters())
    said = {"model": name, "layers": depth(model), "parameters": parameters, "cluster": asked.cluster,
            "batch": asked.batch, "tokens": asked.tokens, "mode": mode, **made()}  # fmt: skip
    try:
        step = _planned(asked, LossOnly(model), mode)
    except AutoparError as error:
        return {**said, "error": str(error).splitlines()[0][:400], "cpu_seconds": _since(began)}
    plan, host = step.plan, step.cluster.host
    assert host is not None
    seconds = plan.predicted.step_seconds
    tokens = asked.batch * asked.tokens
    return {
        **said,
        "step_seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "model_tflops": round(6e-12 * parameters * tokens / seconds, 1),
        "compute_seconds": round(plan.predicted.compute_seconds, 2),
        "exposed_communication_seconds": round(plan.predicted.exposed_communication_seconds, 2),
        "peak_bytes": plan.predicted.peak_bytes,
        "host_memory_bytes": host.memory_bytes,
        **(waiting(step) if plan.waits_on_host else {}),
        "recomputed": sum(chosen.recompute for chosen in plan.operators.values()),
        "operators": len(plan.operators),
        "micro_batches": plan.micro_batches,
        "cpu_seconds": _since(began),
    }


def cut(model: nn.Module, layers: int | None) -> None:
    """Leave so many layers."""
    if layers is not None:
        del _decoder(model)[layers:]


def depth(model: nn.Module) -> int:
    """How many layers a model has."""
    return len(_decoder(model))


def _decoder(model: nn.Module) -> nn.ModuleList:
    return next(each for each in model.modules() if isinstance(each, nn.ModuleList))


def _planned(asked: Setting, model: nn.Module, mode: Mode) -> StepProgram:
    inputs = token_inputs(asked.vocabulary)(asked.batch, asked.tokens)
    request = Request(
        cluster=asked.cluster_of(), optimizer=OPTIMIZER, with_baselines=False, mode=mode, offload="all",
        micro_batches=1,
    )  # fmt: skip
    captured = capture_example(model, (), inputs, request, Captures())
    plan = make_plan(captured.program, request, recapture=captured)
    return StepProgram(plan, with_kernels(captured.program, plan.kernels), request.cluster, OPTIMIZER)


def _since(began: float) -> float:
    return round(time.process_time() - began, 1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", "names", type=click.Choice(list(SETTINGS)), multiple=True, help="These settings only.")
@click.option("--layers", type=int, multiple=True, help="Models of so many layers, one after the other.")
@click.option("--mode", default="fast", show_default=True, help="How long to search.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Where the rows are joined.")
def main(names: tuple[str, ...], layers: tuple[int, ...], mode: Mode, output: Path | None) -> None:
    """Plan and say what it takes."""
    for name in names or SETTINGS:
        for each in layers or (None,):
            found = row(name, each, mode)
            click.echo(json.dumps(found))
            if output is not None:
                keep(output, found)


def keep(output: Path, found: Mapping[str, Any]) -> None:
    """Write a row in place of that of the same model and depth."""
    kept = json.loads(output.read_text())["rows"] if output.exists() else []
    rows = [each for each in kept if (each["model"], each["layers"]) != (found["model"], found["layers"])]
    order = [*SETTINGS]
    rows = sorted((*rows, found), key=lambda each: (order.index(each["model"]), each["layers"]))
    command = shlex.join(["python", "-m", "benchmarks.offload_paper", *sys.argv[1:]])
    write_results(output, {"rows": rows, "command": command})


if __name__ == "__main__":
    main()
