"""Read: a solved Problem -> the Plan in the words of the user.

Also derives what people ask of a plan: each choice with its runner-up and the cost of switching to it (all other
choices held), and the share of FLOPs that runs replicated.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost_models.kernel_seconds import dtype_name
from autopar.graphs.operator_names import base_name
from autopar.layouts.placement import Layout, Mesh, replicated
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.possible_forms import added_variance
from autopar.planner.memory.recomputation import FORM_OF, ON_HOST, RECOMPUTED, SAVED, state_of
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.prices import Floats
from autopar.planner.solver import FORBIDDEN, Problem
from autopar.plans.plan_text import SAVED_AS, axes_in_words, format_placements, in_words, parameter_in_words
from autopar.plans.plan_value import (
    DEFAULT_IMPLEMENTATION,
    DEVICE,
    HOST,
    MASK,
    ROUNDED_BITS,
    WHOLE,
    OperatorPlan,
    ParameterPlan,
)
from autopar.program import Program

Assignment = NDArray[np.int64]
_STATES: Mapping[int | None, str] = {
    RECOMPUTED: ", computed again in backward",
    ON_HOST: ", waits on the host",
    **{state: f", saved {SAVED_AS[form]}" for state, form in FORM_OF.items()},
}
NEAREST = 2
"""Other choices that are named beside every choice."""


def read_parameters(built: Built, assignment: Assignment) -> dict[str, ParameterPlan]:
    """Decision of every parameter, by name, with the copies that its consumers share."""
    found = {}
    for node, index in built.placeholders.items():
        variable = built.variables[index]
        if variable.kind == "parameter":
            label = variable.labels[assignment[index]]
            found[variable.name] = ParameterPlan(
                stored=label.stored,
                used=label.used,
                gradient=label.gradient,
                keep_gathered=label.keep_gathered,
                stored_on=label.stored_on,
                shared_forward=_copy_layout(built, assignment, node, 0, "forward"),
                shared_backward=_copy_layout(built, assignment, node, 0, "backward"),
            )
    return found


def read_operators(built: Built, assignment: Assignment, mesh: Mesh) -> dict[str, OperatorPlan]:
    """Decision of every operator, by name, in program order."""
    return {
        str(node.meta["operator"]): _read_operator(built, assignment, node, index, mesh)
        for node, index in built.operators.items()
    }


def _read_operator(built: Built, assignment: Assignment, node: fx.Node, index: int, mesh: Mesh) -> OperatorPlan:
    strategies = built.variables[index].strategies
    assert strategies is not None
    chosen = int(assignment[index])
    state = state_of(built.variables[index], chosen)
    is_recomputed = state == RECOMPUTED
    num_outputs = len(strategies.outputs)
    forward = tuple(_copy_layout(built, assignment, node, o, "forward") for o in range(num_outputs))
    backward = tuple(_copy_layout(built, assignment, node, o, "backward") for o in range(num_outputs))
    return OperatorPlan(
        axes=strategies.axes[chosen],
        inputs=tuple(layouts.distinct[layouts.index[chosen]] for layouts in strategies.inputs),
        outputs=tuple(
            replicated(len(mesh.shape)) if layouts is None else layouts.distinct[layouts.index[chosen]]
            for layouts in strategies.outputs
        ),
        shared_forward=forward if any(forward) else (),
        shared_backward=backward if any(backward) else (),
        recompute=is_recomputed,
        recompute_at=built.variables[index].anew if is_recomputed else (),
        saved_on=HOST if state == ON_HOST else DEVICE,
        saved_as=WHOLE if state is None else FORM_OF.get(state, WHOLE),
        implementation=strategies.implementation(chosen),
    )


def recomputation_statistics(built: Built, assignment: Assignment, lifetimes: Lifetimes) -> dict[str, str]:
    """{"recomputed": what is computed again}, per block and with the operators, or nothing.

    A block is recomputed in full where nothing that it keeps for its own backward is left.
    """
    spans, lifetimes = lifetimes, lifetimes.alone
    kept: dict[int, int] = {}
    again: dict[int, list[str]] = {}
    for node, index in built.operators.items():
        state, home = state_of(built.variables[index], int(assignment[index])), lifetimes.segment[node]
        if state == RECOMPUTED:
            again.setdefault(home, []).append(base_name(node.target))
        elif state in (SAVED, ON_HOST, *FORM_OF) and home in lifetimes.reading_segments(node):
            kept[home] = kept.get(home, 0) + 1
    blocks = {segment for segment, name in enumerate(lifetimes.segments.names) if name}
    full = [segment for segment in again if segment in blocks and segment not in kept]
    partly = [segment for segment in again if segment in blocks and segment in kept]
    parts = [f"{len(full)} of {len(blocks)} blocks in full"] if full else []
    if partly:
        parts.append(f"{len(partly)} of {len(blocks)} blocks selectively ({_listed(again, partly)})")
    if outside := [segment for segment in again if segment not in blocks]:
        parts.append(f"outside of blocks {_listed(again, outside)}")
    if again and max(spans.lengths) > 1:
        parts.append(f"in {len(spans.starts)} spans of up to {max(spans.lengths)} segments")
    return {"recomputed": ", ".join(parts)} if parts else {}


def form_statistics(operators: Mapping[str, OperatorPlan]) -> dict[str, str]:
    """{"saved smaller": how many operators in which form, and how much of their variance over samples rounding adds to
    gradients}, or nothing."""
    counts = Counter(operator.saved_as for operator in operators.values() if operator.saved_as != WHOLE)
    parts = [f"{counts[form]} {SAVED_AS[form]}" for form in (MASK, *ROUNDED_BITS) if form in counts]
    fewest = min((bits for form, bits in ROUNDED_BITS.items() if form in counts), default=None)
    if fewest is not None:
        parts.append(
            f"which adds to a gradient up to {added_variance(fewest):.2g} of the variance that it has over samples"
        )
    return {"saved smaller": ", ".join(parts)} if parts else {}


def implementation_statistics(operators: Mapping[str, OperatorPlan]) -> dict[str, str]:
    """{"operator alternatives": how many operators run as which}, or nothing where all run as captured."""
    counts = Counter(operator.implementation for operator in operators.values())
    del counts[DEFAULT_IMPLEMENTATION]
    said = ", ".join(f"{count} as {name}" for name, count in sorted(counts.items()))
    return {"operator alternatives": said} if said else {}


def _listed(again: Mapping[int, Sequence[str]], segments: Sequence[int]) -> str:
    return ", ".join(sorted({name for segment in segments for name in again[segment]}))


def _copy_layout(built: Built, assignment: Assignment, node: fx.Node, output: int, phase: str) -> Layout | None:
    index = built.copies.get(((node, output), phase))
    return None if index is None else _data_layout(built, assignment, index)


def _data_layout(built: Built, assignment: Assignment, index: int) -> Layout:
    layouts = built.variables[index].layouts[0]
    assert layouts is not None
    return layouts.distinct[layouts.index[assignment[index]]]


def read_data(
    program: Program, built: Built, assignment: Assignment, mesh: Mesh
) -> tuple[dict[str, Layout], dict[str, Layout], dict[str, Layout]]:
    """(inputs, buffers, outputs): name -> layout."""
    inputs, buffers = {}, {}
    for node, entry in zip(program.placeholders, program.inputs, strict=True):
        if entry.role == "input":
            inputs[entry.name] = _data_layout(built, assignment, built.placeholders[node])
        elif entry.role == "buffer":
            buffers[entry.name] = replicated(len(mesh.shape))
    outputs = {}
    for position, output in enumerate(program.outputs):
        if output.role in ("loss", "output"):
            index = built.outputs.get(position)
            outputs[output.name] = (
                replicated(len(mesh.shape)) if index is None else _data_layout(built, assignment, index)
            )
    return inputs, buffers, outputs


def flops_of_pass(built: Built) -> dict[str, float]:
    """FLOPs of the program's operators by the dtype of their results ("bfloat16"), forward and backward, all devices
    together, nothing computed twice; the most first."""
    flops: dict[str, float] = {}
    for node in built.operators:
        rule = built.rules.get(node)
        if rule is not None and rule.flops:
            name = dtype_name(node)
            flops[name] = flops.get(name, 0.0) + rule.flops
    return dict(sorted(flops.items(), key=lambda entry: -entry[1]))


def replicated_flops_share(built: Built, assignment: Assignment, mesh: Mesh) -> float:
    """Share of the program's FLOPs that belong to operators which some axis (of size > 1) replicates."""
    total = replicated_flops = 0.0
    for node, index in built.operators.items():
        rule, strategies = built.rules.get(node), built.variables[index].strategies
        if rule is None or strategies is None:
            continue
        total += rule.flops
        axes = strategies.axes[int(assignment[index])]
        if any(name in (None, "partial") and size > 1 for name, size in zip(axes, mesh.shape, strict=True)):
            replicated_flops += rule.flops
    return replicated_flops / total if total else 0.0


def prices_hash(problem: Problem) -> str:
    """Identifies the cost tables to which objective, bound and gap belong."""
    digest = hashlib.sha256()
    for costs in problem.node_costs:
        digest.update(costs.tobytes())
    for edge in problem.edges:
        digest.update(np.array([edge.source, edge.target]).tobytes())
        digest.update(edge.costs.tobytes())
    return digest.hexdigest()[:16]


def switching_costs(built: Built, assignment: Assignment, mesh: Mesh) -> Mapping[str, tuple[tuple[str, float], ...]]:
    """Name -> the two cheapest other choices (description, seconds more), everything else held: an upper bound of what
    switching costs, as neighbours might follow."""
    costs: list[Floats] = [np.array(variable.costs) for variable in built.variables]
    for edge in built.problem.edges:
        costs[edge.source] += edge.costs[:, assignment[edge.target]]
        costs[edge.target] += edge.costs[assignment[edge.source], :]
    found = {}
    for index, variable in enumerate(built.variables):
        if variable.kind not in ("operator", "parameter") or len(costs[index]) < 2:
            continue
        chosen = int(assignment[index])
        delta = costs[index] - costs[index][chosen]
        delta[chosen] = np.inf
        texts = {describe(variable, chosen, mesh): 0.0}
        for other in np.argsort(delta, kind="stable").tolist():
            if delta[other] < FORBIDDEN / 2 and len(texts) <= NEAREST:
                texts.setdefault(describe(variable, other, mesh), float(delta[other]))
        found[variable.name] = tuple(texts.items())[1:]
    return found


def describe(variable: Variable, label: int, mesh: Mesh, *, with_state: bool = True) -> str:
    """A choice in words: "dp_shard splits m (dim 0)", "stored dp_shard: S(0), used R"; with_state: whether backward
    computes it again, or it waits on the host, belongs to it."""
    if variable.strategies is not None:
        strategies = variable.strategies
        outputs = [None if o is None else o.distinct[o.index[label]] for o in strategies.outputs]
        axes = in_words(axes_in_words(strategies.axes[label], outputs, mesh), strategies.implementation(label))
        state = state_of(variable, label) if with_state else None
        return axes + _STATES.get(state, "")
    if variable.labels:
        return parameter_in_words(variable.labels[label], mesh)
    layouts = variable.layouts[0]
    assert layouts is not None
    return format_placements(layouts.distinct[layouts.index[label]], mesh)
