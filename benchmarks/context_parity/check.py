"""One model under one plan with an axis cp, its ranks together in this process, against the program on one rank.

    parity(model, Settings(dims={"cp": 4}, cp="ring", zigzag=True))     the largest relative error, and what was planned
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar.capture import capture
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Shard
from autopar.planner.planning import make_plan
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.request import Request
from autopar.request.axis_ways import ContextParallelism
from benchmarks.context_parity.models import IN_ZIGZAG, Case
from benchmarks.context_parity.rows import WITHOUT_ATTENTION
from tests.passes.hand_plans import Results, run_plan, tensors_of

TOLERANCE = 1e-6
"""Norms and losses of transformers count in fp32."""
TOLERANCE_TO_EAGER = 5e-6
"""A scan or a softmax in fp32 adds up in another order there than in the operators that are captured."""
NEGLIGIBLE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Settings:
    """dims, cp and further words of `autopar.plan`; zigzag: the first attention is pinned to that order."""

    dims: Mapping[str, int]
    cp: ContextParallelism | None = None
    zigzag: bool = False
    words: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Number of them."""
        return math.prod(self.dims.values())

    def __str__(self) -> str:
        axes = "x".join(f"{name}{size}" for name, size in self.dims.items())
        words = [f"{name}={value}" for name, value in self.words.items()]
        return " ".join([axes, self.cp or "free", *(["zigzag"] if self.zigzag else []), *words])


WAYS: tuple[ContextParallelism | None, ...] = (None, "ring", "ulysses", "gather")
MIXES = ({"cp": 2, "dp_shard": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "cp_inner": 2}, {"cp": 2, "dp_shard": 2, "tp": 2})


def settings_of(model: str) -> list[Settings]:
    """All settings of a model: zigzag order of those that have a causal attention, which is never padded."""
    if model in WITHOUT_ATTENTION:
        plain = [{"cp": 2}, {"cp": 4}, {"cp": 8}, *MIXES]
        return [Settings(dims=dims) for dims in plain] + [Settings(dims={"cp": 4}, words={"recompute": "full"})]
    orders = (False, True) if model in IN_ZIGZAG else (False,)
    found = [Settings(dims={"cp": n}, cp=cp, zigzag=z) for n in (2, 4, 8) for cp in WAYS for z in orders]
    found += [Settings(dims=dims, cp=cp, zigzag=z) for dims in MIXES for cp in (None, "ring") for z in orders]
    found += [Settings(dims={"cp": 4}, cp=cp, words={"recompute": "full"}) for cp in (None, "ring")]
    return found


class Checked:
    """A model, its program and what one rank makes of it."""

    def __init__(self, build: Callable[[], Case]) -> None:
        self.model, self.inputs = build()
        self.program: Program = capture(self.model, (), self.inputs)
        names = [i.name for i in self.program.inputs if i.role == "input"]
        self.tensors = tensors_of(self.program, self.model, dict(zip(names, self._leaves(), strict=True)))

    def _leaves(self) -> list[Tensor]:
        leaves = torch.utils._pytree.tree_leaves(((), self.inputs))
        return [leaves[index] for index in self.program.tensor_leaves]

    @cached_property
    def alone(self) -> Results:
        """Of one rank."""
        return run_plan(self.program, self.plan(1, mesh=(1,)), self.tensors)

    @cached_property
    def eager(self) -> Results:
        """Of the model as it is, without a capture."""
        model = copy.deepcopy(self.model)
        loss = model(**self.inputs)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        (name,) = self.alone.outputs
        return Results({name: loss.detach()}, gradients)

    def plan(self, ranks: int, **asked: Any) -> Plan:
        """A plan of the model."""
        cluster = Cluster.parse(f"{ranks} cpu")
        return make_plan(self.program, Request(cluster=cluster, mode="fast", with_baselines=False, **asked))

    def settled(self, settings: Settings) -> Plan:
        """The plan of some settings."""
        pinned = {"*/attention#0": "S(2, zigzag)"} if settings.zigzag else None
        dims = dict(settings.dims)
        return self.plan(settings.ranks, dims=dims, cp=settings.cp, constraints=pinned, **settings.words)

    def error(self, plan: Plan, wanted: Results | None = None) -> float:
        """The largest relative error of loss and gradients against those of one rank, or against others."""
        found = run_plan(self.program, plan, self.tensors, recompute=tuple(plan.recomputed))
        return largest_error(found, wanted or self.alone)


def ways(plan: Plan) -> dict[str, int]:
    """How attention runs -> how often: implementation, names that the axes split, and whether in zigzag order."""
    found: Counter[str] = Counter()
    for name, chosen in plan.operators.items():
        if re.search(r"/attention#\d+$", name):
            zigzag = any(isinstance(p, Shard) and p.zigzag for p in chosen.inputs[0])
            found[f"{chosen.implementation} {'+'.join(map(str, chosen.axes))}{' zigzag' if zigzag else ''}"] += 1
    return dict(found)


def largest_error(found: Results, wanted: Results) -> float:
    """Of loss and gradients, relative to their norm; a gradient that is nothing beside the largest one (of a bias of
    keys: the true one is 0) relative to that."""
    assert set(found.gradients) == set(wanted.gradients)
    assert set(found.outputs) == set(wanted.outputs)
    norms = {name: float(gradient.double().norm()) for name, gradient in wanted.gradients.items()}
    least = NEGLIGIBLE * max(norms.values())
    errors = [_distance(found.outputs[name], value) / float(value.norm()) for name, value in wanted.outputs.items()]
    for name, gradient in wanted.gradients.items():
        scale = norms[name] if norms[name] > least else max(norms.values())
        errors.append(_distance(found.gradients[name], gradient) / scale)
    return max(errors)


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm())
