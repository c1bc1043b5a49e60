"""`python -m benchmarks.gpu`; see the package."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.prepare import prepare
from benchmarks.gpu.runner import FAILED, LEFT, Call, run_call
from benchmarks.gpu.stage import Place
from benchmarks.gpu.table import STAGES

CALL_SECONDS = 540.0
"""Of a call that a machine of a pool ends after ten minutes."""


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The command line. Only the standard library: the machine has torch and little else."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="The first day on a GPU.")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="where each stage writes its file")
    parser.add_argument("--resume", type=Path, nargs="+", default=[], help="of earlier calls: what is done is left out")
    parser.add_argument("--carry", type=Path, help="the folder that --prepare wrote")
    parser.add_argument("--prepare", type=Path, help="write plans and the commit there, and measure nothing")
    parser.add_argument("--cluster", nargs="+", default=["1 H100-SXM"], help="with --prepare: what plans are for")
    parser.add_argument("--only", nargs="+", choices=[stage.name for stage in STAGES], help="these stages")
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS, help="what this call may take")
    parser.add_argument("--rehearse", action="store_true", help="every stage on the CPU, at tiny sizes")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """1 where a stage failed, or was left in a rehearsal."""
    asked = parsed(words)
    if asked.prepare is not None:
        prepare(asked.prepare, asked.cluster, tiny=asked.rehearse, say=print)
        return 0
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking whether CUDA is there must not begin a context here
    device = torch.device("cpu" if asked.rehearse else "cuda")
    call = Call(
        place=Place(device=device, rehearse=asked.rehearse, carried=asked.carry),
        output=asked.output,
        resume=asked.resume,
        seconds=asked.seconds,
        command=["python", "-m", "benchmarks.gpu", *words],
    )
    stages = [stage for stage in STAGES if asked.only is None or stage.name in asked.only]
    statuses = run_call(call, stages, lambda line: print(line, flush=True))
    return 1 if FAILED in statuses.values() or (asked.rehearse and LEFT in statuses.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
