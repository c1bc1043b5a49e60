"""Published searches as constrained plans of ours: each is a list of candidates, of which the best predicted one runs.

    megatron     every grid dp x tp x pp, tensor parallelism innermost, 1F1B            (Narayanan et al. 2021)
    galvatron    DDP, ZeRO-3 or tensor parallelism per layer, over all ranks or over a 2-D mesh, one choice for the
                 equal layers and one for what stands in front and behind               (Miao et al. 2022)

Galvatron chooses layer by layer under a memory limit. Without one, equal layers get equal strategies, so a choice for
all of them and one for the ends is the whole of its space here. Where constraints leave an operator free, our planner
takes the best for it: the candidates are as good as theirs or better.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any, TypeAlias

from torch import nn

from benchmarks.plan_quality.baselines.pipelining import micro_batches
from benchmarks.plan_quality.models import Chain

Candidates: TypeAlias = Iterator[Mapping[str, Any]]
"""Arguments of `autopar.Planner.plan`."""

SPLIT: Mapping[str, str] = {
    **dict.fromkeys(("*.query.*", "*.key.*", "*.value.*", "*.up.*", "*.gate.*"), "S(0)"),
    **dict.fromkeys(("*.down.weight", "*.attention.output.weight"), "S(1)"),
    **dict.fromkeys(("front.tokens.weight", "front.tables.*.weight", "head.output.weight"), "S(0)"),
}
"""What tensor parallelism splits, Megatron's table; the other parameters stay whole."""


def megatron(model: nn.Module, ranks: int, batch: int) -> Candidates:
    """Every dp x tp x pp. A U-Net has stages too: skips go straight to their readers."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for pp, dp, tp in itertools.product(sizes, repeat=3):
        if pp * dp * tp == ranks:
            dims = {name: size for name, size in (("pp", pp), ("dp_replicate", dp), ("tp", tp)) if size > 1}
            stages = {"schedule": "1f1b", "micro_batches": micro_batches(batch)} if pp > 1 else {"micro_batches": 1}
            yield {"dims": dims, "mode": "fast", **stages}


def galvatron(model: nn.Module, ranks: int, batch: int) -> Candidates:
    """Uniform hybrids on a 2-D mesh, and every pair of different styles on one axis."""
    for outer, inner in (("dp_replicate", "tp"), ("dp_shard", "tp"), ("dp_replicate", "dp_shard")):
        yield {"dims": {outer: ranks // 2, inner: 2}, "micro_batches": 1, "mode": "fast"}
    if isinstance(model, Chain):
        for layers, ends in itertools.permutations(STYLES, 2):
            yield {
                "mesh": (ranks,),
                "constraints": {**style(model, "layers.*", layers), **style(model, "front", ends)}
                | style(model, "head", ends),
                "micro_batches": 1,
                "mode": "fast",
            }


def style(model: nn.Module, modules: str, name: str) -> dict[str, str]:
    """The constraints that give modules (a glob), their parameters and what leaves them, a strategy of `STYLES`."""
    wishes = {}
    for module, part in model.named_modules():
        if fnmatch(module, modules) and module.count(".") == modules.count("."):
            stored, output = STYLES[name]
            wishes[module] = output
            wishes |= {f"{module}.{leaf}": stored(f"{module}.{leaf}") for leaf, _ in part.named_parameters()}
    return wishes


def split(parameter: str) -> str:
    """How tensor parallelism stores a parameter."""
    return next((placement for glob, placement in SPLIT.items() if fnmatch(parameter, glob)), "R")


STYLES: Mapping[str, tuple[Callable[[str], str], str]] = {
    "ddp": (lambda parameter: "R", "S(0)"),
    "zero": (lambda parameter: "S(0)", "S(0)"),
    "tp": (split, "R"),
}
"""How a strategy stores parameters, and how what leaves a module lies."""

SEARCHES: Mapping[str, Callable[[nn.Module, int, int], Candidates]] = {"megatron": megatron, "galvatron": galvatron}
