"""Jobs of the workers that compare mixtures of experts with the plain model, on meshes of four."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from autopar.runtime.process_groups import rank
from autopar.runtime.step_log import StepLog
from benchmarks.agreement import Agreement, compare, reference
from benchmarks.zoo.registry import Inputs, make
from benchmarks.zoo.transformers_experts import ENTRIES
from tests.capture.expert_models import LOOPS, mixture
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.passes.kernels.test_capped_experts import FACTOR, case, dropped, dropping, products


@dataclass(frozen=True, slots=True)
class ExpertParity:
    """agreement with the plain model; splits: of the expert weights, per parameter; share: of FLOPs replicated."""

    agreement: Agreement
    splits: dict[str, list[str]]
    share: float


def captured(name: str, **_: Any) -> bool:
    """Capture a mixture."""
    return capture_once(f"mixture {name}", *_mixture(name))


@prepared_by(captured)
def parity(name: str, mesh: Sequence[int]) -> ExpertParity:
    """One step of a loop of `LOOPS` or an entry of the zoo, compiled without replicated products."""
    model, inputs = _mixture(name)
    expected = reference(model, inputs)
    module = compile_once(
        f"mixture {name}",
        copy.deepcopy(model),
        inputs,
        mesh=tuple(mesh),
        constraints="no_replicated_compute",
        mode="fast",  # the plain sum, which splits experts; the played step may prefer to split the batch
    )
    splits = {n: list(map(str, layout)) for n, layout in module.plan.placements.items() if "expert" in n}
    share = float(module.plan.statistics["replicated_flops_share"])
    return ExpertParity(compare(module, inputs, expected), splits, share)


@prepared_by(captured)
def dispatched(
    name: str, dims: dict[str, int], log: str
) -> tuple[Agreement, set[tuple[str | None, ...]], dict[str, int]]:
    """One logged step under named axes: agreement with the plain model, what the axes split of the products, and the
    rows that rank 0 has logged, per module."""
    model, inputs = _mixture(name)
    expected = reference(model, inputs)
    ep = "two_level" if "ep_inner" in dims else "dispatch"
    module = compile_once(f"mixture {name}", copy.deepcopy(model), inputs, dims=dims, ep=ep, mode="fast")
    products = {chosen.axes for call, chosen in module.plan.operators.items() if "/expert_" in call}
    with StepLog(log, module.plan) as steps, steps.step():
        agreement = compare(module, inputs, expected)
    counted = {} if rank() else json.loads(Path(log).read_text())["expert_rows"]
    return agreement, products, {module: sum(rows) for module, rows in counted.items()}


def captured_capped(**_: Any) -> bool:
    """Capture the mixture of a capacity."""
    return capture_once("mixture of a capacity", case().model, dict(case().inputs))


@prepared_by(captured_capped)
def capped(log: str) -> tuple[Agreement, set[tuple[str | None, ...]], list[int], list[int]]:
    """One logged step over an axis ep: agreement with the plain mixture that drops alike, what the axis splits of the
    products, and how many rows of rank 0 were dropped and should have been, per expert."""
    of = case()
    asked: dict[str, Any] = {"dims": {"ep": 4}, "ep": "capacity", "expert_capacity": FACTOR, "mode": "fast"}
    module = compile_once("mixture of a capacity", copy.deepcopy(of.model), dict(of.inputs), **asked)
    expected = reference(dropping(of, 4), of.inputs)
    with StepLog(log, module.plan) as steps, steps.step():
        agreement = compare(module, of.inputs, expected)
    counted = [] if rank() else next(iter(json.loads(Path(log).read_text())["dropped_rows"].values()))
    return agreement, products(module.plan), counted, dropped(of, 4, own=0)


def _mixture(name: str) -> tuple[nn.Module, Inputs]:
    return mixture(name) if name in LOOPS else make(next(entry for entry in ENTRIES if entry.name == name))
