"""Jobs of the workers that compare mixtures of experts with the plain model, on meshes of four."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import autopar
from benchmarks.agreement import Agreement, compare, reference
from benchmarks.zoo.registry import make
from benchmarks.zoo.transformers_experts import ENTRIES
from tests.capture.expert_models import LOOPS, mixture


@dataclass(frozen=True, slots=True)
class ExpertParity:
    """agreement with the plain model; splits: of the expert weights, per parameter; share: of FLOPs replicated."""

    agreement: Agreement
    splits: dict[str, list[str]]
    share: float


def parity(name: str, mesh: Sequence[int]) -> ExpertParity:
    """One step of a loop of `LOOPS` or an entry of the zoo, compiled without replicated products."""
    model, inputs = mixture(name) if name in LOOPS else make(next(e for e in ENTRIES if e.name == name))
    expected = reference(model, inputs)
    module = autopar.compile(
        copy.deepcopy(model),
        inputs,
        mesh=tuple(mesh),
        constraints="no_replicated_compute",
        mode="fast",  # the plain sum, which splits experts; the played step may prefer to split the batch
    )
    splits = {n: list(map(str, layout)) for n, layout in module.plan.placements.items() if "expert" in n}
    share = float(module.plan.statistics["replicated_flops_share"])
    return ExpertParity(compare(module, inputs, expected), splits, share)
