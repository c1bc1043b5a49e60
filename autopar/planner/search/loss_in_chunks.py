"""The loss of a language model in chunks, where memory is short: all logits never exist, and are computed twice.

A cross-entropy of ours may join the product in front of it (`kernels`: linear_cross_entropy), where the model does not
return its logits. That costs a product more, so that no plan wants it whose memory suffices; one whose memory does not
is planned with it, too, where that saves enough, and the shorter step is the answer. Both are planned under one
question, each with a bound of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from autopar.errors import InfeasibleError
from autopar.ops.linear_cross_entropy import chunk_rows
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.planner.one_mesh.query import Query
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_seconds
from autopar.program import Program
from autopar.request import Request
from autopar.rules.call import tensor_operands

log = logging.getLogger(__name__)

KIND = "linear_cross_entropy"
LEAST_SAVED = 0.05
"""Share of the memory that chunks must save on a device with its share of the rows: planning takes twice as long."""
FULL = 0.9
"""Share of the memory from which on a plan is taken for one that had to mind it."""


def planned_in_chunks_too(program: Program, request: Request, query: Query, search: Callable[[Query], Plan]) -> Plan:
    """The plan that a search finds; or the one with the loss in chunks, where memory is short, time is left and its
    step is shorter. Raises InfeasibleError where neither fits."""
    other = _in_chunks(program, request, query)
    if other is None:
        return search(query)
    try:
        plan = search(query)
    except InfeasibleError as why:
        log.info("nothing fits (%s): planning with the loss in chunks", why)
        try:
            return search(other)
        except InfeasibleError:
            raise why from None
    if query.deadline.left() <= 0 or not _minds_memory(plan, query):
        return plan
    log.info("memory is short: planning with the loss in chunks, too")
    try:
        found = search(other)
    except InfeasibleError:
        return plan
    shorter = found.predicted.step_seconds < plan.predicted.step_seconds
    chosen, left = (found, plan) if shorter else (plan, found)
    how = "in chunks" if shorter else "whole"
    note = (
        f"memory is short: the loss is computed {how}, {format_seconds(chosen.predicted.step_seconds)} a step; "
        f"{'whole' if shorter else 'in chunks'} it takes {format_seconds(left.predicted.step_seconds)}"
    )
    return replace(chosen, notes=(*chosen.notes, note))


def _in_chunks(program: Program, request: Request, query: Query) -> Query | None:
    """The question with the loss in chunks; None where the kernels are named, or there is no such loss."""
    if request.kernels is not None or KIND in query.kernels or "cross_entropy" not in query.kernels:
        return None
    kernels = (*query.kernels, KIND)
    if _saved_bytes(with_kernels(program, kernels), query.cluster.num_devices) < LEAST_SAVED * query.budget_bytes:
        return None
    asked = replace(request, kernels=kernels)
    return replace(Query.of(program, asked, recapture=query.recapture, kept=query.kept), deadline=query.deadline)


def _saved_bytes(program: Program, devices: int) -> float:
    """What logits and their gradient take, less what chunks of them and the gradient of the weight in fp32 take, on one
    of so many devices that split the rows."""
    saved = 0.0
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.autopar.linear_cross_entropy.default):
        hidden, weight = (operand.meta["val"] for operand in tensor_operands(node)[:2])
        rows, (words, width), element = hidden.shape[0] / devices, weight.shape, hidden.dtype.itemsize
        wide = 4 * words * width if element < 4 else 0
        saved += 2 * rows * words * element - chunk_rows(int(rows), words, width) * words * element - wide
    return saved


def _minds_memory(plan: Plan, query: Query) -> bool:
    """Whether a plan is nearly full, computes again, or cuts the batch though nobody asked."""
    again = any(operator.recompute for operator in plan.operators.values())
    parts = plan.micro_batches > 1 and query.micro_batches is None and not plan.in_stages
    return again or parts or plan.predicted.peak_bytes > FULL * query.budget_bytes
