"""The planner's prices of a plan and those of the program that is lowered from it are the same numbers.

What legitimately differs, and is left out or bounded here:
- copies beside collectives: the planner pays them with the redistribution, the program as kernels of their own;
- a fused kernel that a redistribution cuts in two: only the program knows; its pieces start and read once more;
- what the loss costs to be whole on every rank, and collectives inside of an operator (a norm over split rows): part of
  the operator's price in the planner, actions of their own in the program;
- ties: the planner adds 5e-9 s per replicated axis, so that among equal plans the still one wins.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch
from torch import fx
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.capture import capture
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.graphs.kernel_groups import added_gradient, added_rows, group_reads_writes, kernel_groups
from autopar.graphs.node_values import describe_values
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.passes.lowering.step_halves import split_forward_backward
from autopar.planner.one_mesh.choose_kernels import cheaper_kernels
from autopar.planner.one_mesh.mesh_plan import Candidate, plan_on_mesh
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.factorisation import Factorisation
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.planner.problem.search_limits import SEARCH
from autopar.program import Program
from autopar.request.constraints import Constraints
from autopar.rules.alternatives import alternatives_offered
from tests.passes.lowered_programs import lower

CLUSTER = Cluster.parse("8 H100-SXM")
TIES = 1e-7
"""Seconds of the ties of one kernel's operators, at most."""
Kernels = dict[frozenset[str], float]


@pytest.fixture(scope="module")
def program() -> Program:
    shape = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, tokens = LlamaForCausalLM(shape), torch.empty(16, 1024, dtype=torch.long)
    return capture(model, (), {"input_ids": tokens, "labels": tokens}, precision="bf16")


def planned(
    program: Program,
    mesh: Mesh,
    backend: str,
    offered: frozenset[str] = frozenset(),
    kernels: tuple[str, ...] = (),
) -> Candidate:
    query = Query(
        program=program,
        cluster=CLUSTER,
        state_bytes=state_bytes(program, "AdamW"),
        constraints=Constraints(),
        budget_bytes=float("inf"),
        kernel_backend=backend,
        factorisation=Factorisation(program),
        search=SEARCH["fast"],
        offered=offered,
        kernels=kernels,
    )
    return plan_on_mesh(query, mesh)


def planner_kernels(program: Program, candidate: Candidate, backend: str) -> Kernels:
    """Operators that share a kernel (without additions that join a norm) -> what the planner's tables say of them in
    the chosen layouts."""
    seconds = {
        variable.node: float(variable.costs[label])
        for variable, label in zip(candidate.built.variables, candidate.solution.assignment, strict=True)
        if variable.kind == "operator"
    }
    groups = kernel_groups(program.graph, backend)
    members = defaultdict(list)
    for node, group in groups.items():
        members[group].append(node)
    beside = [(addition, norm) for norm in groups for addition in (added_rows(norm), added_gradient(norm)) if addition]
    joined = {addition for addition, norm in beside if groups[addition] == groups[norm]}
    left_out = {node for node in candidate.built.rules if communicates(node, candidate)}
    left_out |= {node for out, node in zip(program.outputs, program.returned, strict=True) if out.role == "loss"}
    return {
        frozenset(str(node.meta["operator"]) for node in nodes if node not in joined): sum(seconds[n] for n in nodes)
        for nodes in members.values()
        if all(node in seconds and node not in left_out for node in nodes)
    }


def communicates(node: fx.Node, candidate: Candidate) -> bool:
    """Whether an operator holds collectives in the chosen layouts."""
    rule = candidate.built.rules[node]
    inside = rule.synchronised_bytes.keys() | rule.exchanged_bytes.keys()
    return not inside.isdisjoint(candidate.plan.operators[str(node.meta["operator"])].axes)


def lowered_kernels(program: Program, candidate: Candidate, backend: str) -> Kernels:
    """The same of the lowered program, without copies that belong to redistributions."""
    partition = split_forward_backward(lower(program, candidate.plan, rank=0))
    prices, found = KernelPrices(device=CLUSTER.device), Counter[frozenset[str]]()
    assert partition.backward is not None
    for graph in (partition.forward.graph, partition.backward.graph):
        describe_values(graph.nodes)
        groups = kernel_groups(graph, backend)
        traffic = group_reads_writes(graph, groups)
        members = defaultdict(list)
        for node, group in groups.items():
            if node.meta.get("redistributes") is None and node.target.__name__ not in ("padded", "pieces_first"):
                members[group].append((node, traffic[node]))
        for nodes in members.values():
            found[frozenset(str(node.meta["operator"]) for node, _ in nodes)] += prices.seconds(nodes)
    return dict(found)


@pytest.mark.exhaustive(sample="mesh0-eager")
@pytest.mark.parametrize("backend", ["inductor", "eager"])
@pytest.mark.parametrize("mesh", [Mesh(("dp_replicate",), (8,)), Mesh(("outer", "inner"), (2, 4))])
def test_a_plan_and_its_lowered_program_have_one_price(program: Program, mesh: Mesh, backend: str) -> None:
    compare(program, planned(program, mesh, backend), backend)


def compare(program: Program, candidate: Candidate, backend: str) -> None:
    ours, road = planner_kernels(program, candidate, backend), lowered_kernels(program, candidate, backend)
    both = ours.keys() & road.keys()
    for names in both:
        assert ours[names] == pytest.approx(road[names], rel=1e-9, abs=TIES), sorted(names)
    alike = sum(road[names] for names in both)
    assert alike > 0.97 * sum(road.values())
    assert alike > 0.97 * sum(ours.values())


def test_kernels_of_ours_have_one_price_too(program: Program) -> None:
    kinds = cheaper_kernels(program, "inductor", CLUSTER.device)
    assert {"rms_norm", "gated", "cross_entropy"} <= {*kinds}
    ours = with_kernels(program, kinds)
    compare(ours, planned(ours, Mesh(("outer", "inner"), (2, 4)), "inductor", kernels=kinds), "inductor")


def test_members_of_a_fused_kernel_add_up_to_it_only_if_they_share_its_cache(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above notices a price that differs by what L2 keeps of a few megabytes."""
    monkeypatch.setattr("autopar.planner.problem.equivalence.kernel_shares", lambda groups, traffic: {})
    with pytest.raises(AssertionError):
        test_a_plan_and_its_lowered_program_have_one_price(program, Mesh(("dp_replicate",), (8,)), "inductor")


def test_operator_alternatives_have_one_price_too(program: Program) -> None:
    candidate = planned(program, Mesh(("outer", "inner"), (2, 4)), "inductor", alternatives_offered("fp8"))
    assert candidate.plan.implementations == {"fp8_rowwise"}
    compare(program, candidate, "inductor")
