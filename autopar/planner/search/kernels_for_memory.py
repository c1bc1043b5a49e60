"""Kernels for memory: where it is short, products are computed twice so that their large results never exist.

    linear_cross_entropy    the loss in chunks: no logits, and no gradient of them
    tiled_mlp               MLPs in tiles of the sequence: no hidden activations, and no gradients of them

Each kind costs products more (`kernels`), so that no plan wants it whose memory suffices. Where that of a plan does
not, another is made with the kind that saves most, where it saves enough, and a third with both where the second is
still short; the shortest step that fits is the answer. All are planned under one question, each with its own bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from autopar.errors import InfeasibleError
from autopar.ops.linear_cross_entropy import chunk_rows
from autopar.ops.tiled_mlp import tile_rows
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.planner.one_mesh.query import Query
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import KERNELS
from autopar.plans.plan_text import format_seconds
from autopar.program import Program
from autopar.request import Request
from autopar.rules.call import tensor_operands

log = logging.getLogger(__name__)
ours = torch.ops.autopar

LOSS, MLP = "linear_cross_entropy", "tiled_mlp"
WORDS = {LOSS: "the loss in chunks", MLP: "MLPs in tiles"}
LEAST_SAVED = 0.05
"""Share of the memory that a kind must save on a device with its share of the rows: each plan takes as long as one."""
FULL = 0.9
"""Share of the memory from which on a plan is taken for one that had to mind it."""

Kinds = tuple[str, ...]


def planned_for_memory_too(program: Program, request: Request, query: Query, search: Callable[[Query], Plan]) -> Plan:
    """The plan that a search finds; or one with kinds that save memory, where that is short, time is left and its step
    is shorter. Raises InfeasibleError where none fits."""
    saving = _saving(program, request, query)
    found: dict[Kinds, Plan] = {}
    failures: dict[Kinds, InfeasibleError] = {}
    for count in range(len(saving) + 1):
        kinds = saving[:count]
        if count:
            log.info("memory is short: planning with %s, too", _words(kinds))
        try:
            plan = found[kinds] = search(query if not count else _with(program, request, query, kinds))
        except InfeasibleError as why:
            failures[kinds] = why
            if found:
                break
        else:
            if query.deadline.left() <= 0 or not _minds_memory(plan, query):
                break
    if not found:
        raise failures[kinds] from None  # of the last kinds, which take least
    return _shortest(found, failures)


def _shortest(found: Mapping[Kinds, Plan], failures: Mapping[Kinds, InfeasibleError]) -> Plan:
    """The plan with the shortest step, with a note that says what it was compared with."""
    chosen = min(found, key=lambda kinds: found[kinds].predicted.step_seconds)
    if len(found) + len(failures) == 1:
        return found[chosen]
    others = [f"{_seconds(plan)} with {_words(kinds)}" for kinds, plan in found.items() if kinds != chosen]
    others += [f"no plan fits with {_words(kinds)}" for kinds in failures]
    note = f"memory is short: {_words(chosen)}, {_seconds(found[chosen])} a step; {', '.join(others)}"
    return replace(found[chosen], notes=(*found[chosen].notes, note))


def _words(kinds: Kinds) -> str:
    return " and ".join(WORDS[kind] for kind in kinds) or "everything whole"


def _seconds(plan: Plan) -> str:
    return format_seconds(plan.predicted.step_seconds)


def _saving(program: Program, request: Request, query: Query) -> Kinds:
    """The kinds that save enough, that which saves most first; () where the kernels are named. A loss in chunks is a
    cross-entropy of ours, which runs on CUDA; MLPs in tiles are products of torch on any device."""
    if request.kernels is not None:
        return ()
    saved = {}
    for kind in (LOSS, MLP):
        joins = kind == MLP or "cross_entropy" in query.kernels
        if joins and kind not in query.kernels:
            saved[kind] = SAVED_BYTES[kind](with_kernels(program, (*query.kernels, kind)), query.cluster.num_devices)
    enough = [kind for kind, nbytes in saved.items() if nbytes >= LEAST_SAVED * query.budget_bytes]
    return tuple(sorted(enough, key=lambda kind: -saved[kind]))


def _with(program: Program, request: Request, query: Query, kinds: Kinds) -> Query:
    """The question with further kinds."""
    kernels = tuple(kind for kind in KERNELS if kind in (*query.kernels, *kinds))
    asked = replace(request, kernels=kernels)
    return replace(Query.of(program, asked, recapture=query.recapture, kept=query.kept), deadline=query.deadline)


def _saved_by_chunks(program: Program, devices: int) -> float:
    """What logits and their gradient take, less what chunks of them and the gradient of the weight in fp32 take, on one
    of so many devices that split the rows."""
    saved = 0.0
    for node in program.graph.find_nodes(op="call_function", target=ours.linear_cross_entropy.default):
        hidden, weight = (operand.meta["val"] for operand in tensor_operands(node)[:2])
        rows, (words, width), element = hidden.shape[0] / devices, weight.shape, hidden.dtype.itemsize
        wide = 4 * words * width if element < 4 else 0
        saved += 2 * rows * words * element - chunk_rows(int(rows), words, width) * words * element - wide
    return saved


def _saved_by_tiles(program: Program, devices: int) -> float:
    """What the hidden tensors of the largest MLP take at once, less what those of a tile and gradients of weights in
    fp32 take, on one of so many devices that split the rows. What forward keeps of all MLPs is more, but computing it
    again saves it as well."""
    saved = [0.0]
    for target, is_backward in ((ours.tiled_mlp.default, False), (ours.tiled_mlp_backward.default, True)):
        for node in program.graph.find_nodes(op="call_function", target=target):
            x, first, *parameters = (one.meta["val"] for one in tensor_operands(node)[1 if is_backward else 0 :])
            rows, width = x.shape[0] / devices, x.shape[1]
            matrices = [one.numel() for one in (first, *parameters) if one.dim() == 2]
            tensors = (2 if is_backward else 1) * (len(matrices) - 1) + 1
            wide = 4 * sum(matrices) if is_backward and x.dtype.itemsize < 4 else 0
            one_row = tensors * (first.numel() // width) * x.dtype.itemsize
            saved.append((rows - tile_rows(int(rows), width)) * one_row - wide)
    return max(saved)


SAVED_BYTES: Mapping[str, Callable[[Program, int], float]] = {LOSS: _saved_by_chunks, MLP: _saved_by_tiles}


def _minds_memory(plan: Plan, query: Query) -> bool:
    """Whether a plan is nearly full, computes again, or cuts the batch though nobody asked."""
    parts = plan.micro_batches > 1 and query.micro_batches is None and not plan.in_stages
    return bool(plan.recomputed) or parts or plan.predicted.peak_bytes > FULL * query.budget_bytes
