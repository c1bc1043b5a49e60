"""Job of the workers that run models whose graphs inductor compiles."""

from __future__ import annotations

import copy

import torch

from benchmarks.agreement import Agreement, compare, reference
from benchmarks.emit_backends import MODELS, Size, compilations
from tests.distributed.captured_once import compile_once

SMALL = Size(layers=2, width=32, vocabulary=64, batch=8, length=16)


def in_pieces(name: str, dims: dict[str, int]) -> tuple[Agreement, int, int]:
    """Agreement of a plan whose graphs inductor compiles with the plain model; compiled pieces, and compilations."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](SMALL)
    plan = compile_once(f"small {name}", copy.deepcopy(model), inputs, dims=dims, mode="fast").plan
    module = compile_once(f"small {name}", copy.deepcopy(model), inputs, plan=plan.with_(kernel_backend="inductor"))
    return compare(module, inputs, reference(model, inputs)), *compilations(module, inputs)
