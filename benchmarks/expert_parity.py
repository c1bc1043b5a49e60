"""Expert parallelism beside one rank: loss and every gradient of mixtures of experts whose rows travel.

    python -m benchmarks.expert_parity                                 # all models, all settings
    python -m benchmarks.expert_parity --model mixtral --ranks 4

The ranks run together in this process, in fp64 where the model can (parts of transformers compute in fp32), against the
program on one rank. Exits with 1 if an error is above `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial

import torch
from rich.console import Console
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.passes.lowering.observers import CHECK_VARIABLE
from autopar.plans.parallel_plan import Plan
from benchmarks.context_parity.check import Checked, Settings
from benchmarks.zoo.registry import make
from benchmarks.zoo.transformers_experts import ENTRIES
from tests.capture.expert_models import LOOPS, mixture

TOLERANCE = 1e-6
TOLERANCE_IN_FP32 = 2e-4
IN_FP32 = frozenset({"switch_transformers", "nllb_moe"})
"""Their routers compute in fp32 whatever the model is in, and refuse fp64 inputs."""
DISPATCH, TWO_LEVEL = {"ep": "dispatch"}, {"ep": "two_level"}
SETTINGS = (
    *(Settings(dims={"ep": n}, words=DISPATCH) for n in (2, 4, 8)),
    Settings(dims={"dp_shard": 2, "ep": 2}, words=DISPATCH),
    Settings(dims={"ep": 2, "tp": 2}, words=DISPATCH),
    Settings(dims={"dp_shard": 2, "ep": 2, "tp": 2}, words=DISPATCH),
    Settings(dims={"ep": 2, "ep_inner": 2}, words=TWO_LEVEL),
    Settings(dims={"ep": 2, "ep_inner": 4}, words=TWO_LEVEL),
    Settings(dims={"ep": 2, "ep_inner": 2, "tp": 2}, words=TWO_LEVEL),
    Settings(dims={"ep": 2, "ep_inner": 2}, words={**TWO_LEVEL, "replicated_experts": {"*": [1]}}),
    Settings(dims={"ep": 4}, words={**DISPATCH, "recompute": "full"}),
    Settings(dims={"ep": 2}, words={**DISPATCH, "replicated_experts": {"*": [1]}}),
    Settings(dims={"dp_shard": 2, "ep": 2}, words={**DISPATCH, "replicated_experts": {"*": [0]}}),
)
MODELS = (*(entry.name for entry in ENTRIES), *(f"loop {name}" for name in LOOPS))


def case(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and its inputs, in fp64 but for `IN_FP32`."""
    of_transformers = {entry.name: entry for entry in ENTRIES}
    made: tuple[nn.Module, Mapping[str, Tensor]] = (
        make(of_transformers[name]) if name in of_transformers else mixture(name.removeprefix("loop "))
    )
    model, inputs = made
    if name in IN_FP32:
        return model, dict(inputs)
    return model.double(), {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}


def splits(plan: Plan) -> Mapping[str, int]:
    """What the axes split of products of experts -> of how many."""
    return Counter(
        " x ".join(map(str, chosen.axes)) for name, chosen in plan.operators.items() if "/expert_" in name
    )


def main() -> None:
    """Check the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="of these only")
    parser.add_argument("--ranks", type=int, action="append", help="on so many ranks only")
    arguments = parser.parse_args()
    os.environ.setdefault(CHECK_VARIABLE, "1")
    console, wrong = Console(width=180), 0
    for name in arguments.model or MODELS:
        checked, most = Checked(partial(case, name)), TOLERANCE_IN_FP32 if name in IN_FP32 else TOLERANCE
        for settings in SETTINGS:
            if arguments.ranks and settings.ranks not in arguments.ranks:
                continue
            started = time.monotonic()
            try:
                plan = checked.settled(settings)
                error = checked.error(plan)
                wrong += not error < most
                found = f"{error:.1e} {dict(splits(plan))} {'' if error < most else 'DIFFERS'}"
            except AutoparError as refusal:
                found = f"{type(refusal).__name__}: {refusal}"
            console.print(
                f"{name:24} {settings!s:36} {time.monotonic() - started:5.1f} s  {found}", highlight=False, markup=False
            )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
