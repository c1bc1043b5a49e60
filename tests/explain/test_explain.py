"""What a plan says of itself is what its problem says, evaluated by code that shares nothing with it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import autopar
from autopar.errors import ConfigurationError, InfeasibleError, PlanMismatchError
from autopar.explain.answers import Comparison, Explanations
from autopar.explain.binding_limits import BindingLimits
from autopar.explain.cost_terms import cost_terms
from autopar.explain.memory_pieces import loss_operators, moment_of, owner_of
from autopar.explain.origin import Remembered
from autopar.explain.recovered import recovered_plan
from autopar.explain.switches import switch_of
from autopar.planner.one_mesh.mesh_plan import EXACT_GAP
from autopar.planner.one_mesh.read_solution import describe
from autopar.planner.one_mesh.recovered_problem import Recovered, described
from autopar.planner.one_mesh.solved_again import Resolver
from autopar.plans.parallel_plan import Plan
from benchmarks.explanation_checks import raw_optimum, recounted
from benchmarks.explanations import CASES
from tests.planner.problems import Mlp

CLUSTER = "4 H100-SXM"
INPUTS = (torch.randn(32, 64), torch.zeros(32, dtype=torch.long))
NAMED = {"dp_shard": 2, "tp": 2}


@pytest.fixture(scope="module")
def planner() -> autopar.Planner:
    return autopar.Planner(Mlp(), INPUTS, cluster=CLUSTER, optimizer=torch.optim.AdamW)


@pytest.fixture(scope="module")
def plan(planner: autopar.Planner) -> Plan:
    return planner.plan(dims=NAMED, constraints={"down.weight": {"tp": "R"}})


def recovered_of(plan: Plan) -> Recovered:
    assert isinstance(plan.origin, Remembered)
    return recovered_plan(plan.origin.source, plan)


def test_a_plan_is_found_again_at_its_own_objective(plan: Plan) -> None:
    recovered = recovered_of(plan)
    assert recovered.objective == pytest.approx(plan.objective_seconds, rel=1e-12)
    counted = recounted(recovered.query, recovered.mesh, recovered.built, recovered.labels.tolist())
    assert counted == pytest.approx(plan.objective_seconds, rel=1e-12)


def test_terms_add_up_to_the_objective(plan: Plan) -> None:
    terms = cost_terms(recovered_of(plan))
    assert math.fsum(term.seconds for term in terms) == pytest.approx(plan.objective_seconds, rel=1e-6)
    assert {"compute", "optimizer", "all_reduce"} <= {term.kind for term in terms}
    assert all(term.seconds > -1e-12 for term in terms)


def test_every_runner_up_costs_what_the_raw_program_says(plan: Plan) -> None:
    recovered = recovered_of(plan)
    resolver = Resolver(recovered, 30.0)
    checked = 0
    for name in ("up.weight", "up.bias", "down.weight", "up/mm#0", "down/mm#1/bwd"):
        index = recovered.variable_of(name)
        variable = recovered.built.variables[index]
        said = describe(variable, int(recovered.labels[index]), recovered.mesh)
        forbidden = {index: np.array([text == said for text in described(variable, recovered.mesh)])}
        if forbidden[index].all():
            continue
        other = resolver.without_choice(index)
        switch = switch_of(recovered, other, index)
        raw = raw_optimum(recovered.built.problem, (), forbidden, 60.0) - recovered.objective
        assert switch.seconds == pytest.approx(raw, rel=1e-3, abs=1e-12)
        assert switch.is_exact
        counted = recounted(recovered.query, recovered.mesh, other.built, other.labels.tolist()) - recovered.objective
        assert switch.seconds == pytest.approx(counted, rel=1e-3, abs=1e-12)
        checked += 1
    assert checked >= 3


def test_the_evaluators_see_a_changed_price(plan: Plan) -> None:
    recovered = recovered_of(plan)
    index = recovered.variable_of("up/mm#0")
    dearer = [costs * (1.01 if node == index else 1.0) for node, costs in enumerate(recovered.built.problem.node_costs)]
    changed = replace(recovered.built.problem, node_costs=tuple(dearer))
    assert raw_optimum(changed, (), {}, 60.0) > recovered.objective * (1 + 1e-6)


def test_a_wish_that_binds_lowers_the_objective_when_it_goes(planner: autopar.Planner, plan: Plan) -> None:
    assert isinstance(plan.origin, Remembered)
    resolver = Resolver(recovered_of(plan), 30.0)
    binding = BindingLimits(plan.origin.source, plan, resolver).binding
    assert any(relaxed.constraint.startswith("axes named") for relaxed in binding)
    for relaxed in binding:
        lower = raw_optimum(relaxed.best.built.problem, relaxed.best.rows, {}, 60.0)
        assert lower == pytest.approx(plan.objective_seconds - relaxed.gain_seconds, rel=1e-6)
        assert lower < plan.objective_seconds


def test_memory_binds_where_the_free_plan_does_not_fit(planner: autopar.Planner) -> None:
    free = planner.plan(mesh=(4,), micro_batches=1)
    tight = planner.plan(mesh=(4,), micro_batches=1, memory_limit=0.7 * free.predicted.peak_bytes)
    explained = tight.explain("up.weight")
    assert isinstance(explained, Explanations)
    memory = [b for b in explained.choices[0].bindings if b.constraint.startswith("memory limit")]
    assert len(memory) == 1
    gain = tight.objective_seconds - free.objective_seconds
    assert memory[0].gain_seconds == pytest.approx(gain, rel=1e-3)
    assert not any(b.constraint.startswith("memory") for c in _explained(free, "*").choices for b in c.bindings)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_exact_runner_up_within_memory_is_the_raw_optimum() -> None:
    """A search within memory ends a thousandth above the optimum, which is more than this runner-up costs."""
    tight = CASES["gpt-memory"].plan(CASES["gpt-memory"].build)
    recovered = recovered_of(tight)
    index = recovered.variable_of("transformer.h.0.mlp.c_fc.weight")
    other = Resolver(recovered, 60.0, EXACT_GAP).without_choice(index)
    assert other.rows
    said = describe(recovered.built.variables[index], int(recovered.labels[index]), recovered.mesh)
    forbidden = {index: np.array([text == said for text in described(other.built.variables[index], recovered.mesh)])}
    raw = raw_optimum(other.built.problem, other.rows, forbidden, 60.0) - recovered.objective
    assert switch_of(recovered, other, index).seconds == pytest.approx(raw, rel=1e-3)


def _explained(plan: Plan, name: str) -> Explanations:
    found = plan.explain(name)
    assert isinstance(found, Explanations)
    return found


def test_an_explanation_names_terms_runner_up_and_what_binds(plan: Plan) -> None:
    found = _explained(plan, "up.weight")
    text = str(found)
    assert "the runner-up, proven" in text
    assert "axes named dp_shard, tp: binds" in text
    assert "mesh axis tp=2: inside a node of 4, NVSwitch4" in text
    assert "costs per step" in text
    assert "tie-break" not in text
    document = found.document()["choices"][0]
    assert document["runner_up"]["is_exact"]
    json.dumps(found.document())


def test_a_glob_explains_what_it_matches_and_an_unknown_name_is_refused(plan: Plan) -> None:
    assert {choice.name for choice in _explained(plan, "*.bias").choices} == {"up.bias", "down.bias"}
    with pytest.raises(ConfigurationError, match="nearest"):
        plan.explain("upp.weight")
    with pytest.raises(ConfigurationError, match="a name, or vs="):
        plan.explain()


@pytest.mark.parametrize("known", ["ddp", "fsdp", "tp"])
def test_differences_add_up_to_the_difference_of_the_sums(plan: Plan, known: str) -> None:
    found = plan.explain(vs=known)
    assert isinstance(found, Comparison)
    this, other = found.objective_seconds
    assert math.fsum(d.total for d in found.differences) == pytest.approx(this - other, rel=1e-6)
    assert math.fsum(found.by_label().values()) == pytest.approx(this - other, rel=1e-6)
    assert any(d.choices for d in found.differences)
    assert known in str(found)
    json.dumps(found.document())


def test_a_plan_does_not_part_from_itself(plan: Plan) -> None:
    found = plan.explain(vs=plan)
    assert isinstance(found, Comparison)
    assert found.differences == ()
    with pytest.raises(ConfigurationError, match="write a plan, or one of ddp"):
        plan.explain(vs="zero-7")


def test_kinds_modules_and_prediction_agree_on_the_peak(plan: Plan) -> None:
    table = plan.memory()
    assert table.peak_bytes == pytest.approx(plan.predicted.peak_bytes)
    assert math.fsum(table.by_kind.values()) == pytest.approx(table.peak_bytes)
    assert math.fsum(table.by_module.values()) == pytest.approx(table.peak_bytes)
    assert max(size for _, size in table.over_time) <= table.peak_bytes
    assert table.by_kind["parameters"] == pytest.approx(plan.predicted.bytes_by_kind["parameters"])
    assert "of the peak" in str(table)
    with pytest.raises(ConfigurationError, match="ranks 0 to 3"):
        plan.memory(rank=4)


def test_code_names_modules_layouts_and_seconds(plan: Plan) -> None:
    program = plan.code(rank=1)
    line = next(line for line in str(program).splitlines() if "up/mm#0 " in line)
    assert "aten.mm(" in line
    assert "dp_shard: S(0), tp: S(1)" in line
    assert line.rstrip().endswith("s")
    assert any(" on " in line and "all_gather" in line for line in str(program).splitlines())
    assert program.seconds > 0


def test_what_if_answers_as_a_new_question_does(plan: Plan) -> None:
    found = plan.what_if(dims={"dp_replicate": 4}, constraints=None)
    alone = autopar.plan(Mlp(), INPUTS, cluster=CLUSTER, optimizer=torch.optim.AdamW, dims={"dp_replicate": 4},
        with_baselines=False)
    assert found.objective_seconds == pytest.approx(alone.objective_seconds, rel=1e-9)
    elsewhere = plan.what_if(cluster="2x4 A100-80", dims={"tp": 8}, constraints=None)
    assert elsewhere.num_ranks == 8
    with pytest.raises(ConfigurationError, match="does not take tp"):
        plan.what_if(tp=4)
    with pytest.raises(InfeasibleError):
        plan.what_if(memory_limit="1KiB")


def test_an_edit_is_completed_priced_and_keeps_the_rest(plan: Plan) -> None:
    found = plan.edit({"up.weight": {"tp": "R"}})
    assert str(found.parameters["up.weight"].stored[1]) == "R"
    assert found.parameters["down.weight"] == plan.parameters["down.weight"]
    assert found.bound_seconds <= found.objective_seconds
    assert recovered_of(plan.edit({})).objective == pytest.approx(plan.objective_seconds, rel=1e-9)
    assert found.what_if(constraints=None).fingerprint == plan.fingerprint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"up.weight": "S(7)"}, r"up\.weight cannot be stored or made S\(7\)"),
        ({"up.weight": {"dp": "R"}}, "names axis 'dp'; the mesh has dp_shard, tp"),
        ({"upp.weight": "R"}, "matches no parameter.*nearest"),
        ({"no_replicated_compute": True}, "edit takes placements"),
    ],
)
def test_an_edit_that_makes_no_sense_names_tensor_axis_and_reason(
    plan: Plan, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        plan.edit(changes)


def test_a_file_needs_its_model_and_a_planner_gives_it(plan: Plan, planner: autopar.Planner) -> None:
    read = Plan.from_json(plan.to_json())
    assert read.origin is None
    assert "instead" in str(read.explain("up.weight"))
    with pytest.raises(ConfigurationError, match=r"bind\(plan\)"):
        read.memory()
    bound = planner.bind(read, dims=NAMED, constraints={"down.weight": {"tp": "R"}})
    assert bound.memory() == plan.memory()
    with pytest.raises(ConfigurationError, match="bind does not take tp"):
        planner.bind(read, tp=1)
    with pytest.raises(PlanMismatchError, match="another graph"):
        planner.bind(replace(read, fingerprint="0" * 64))


def test_a_file_edited_by_hand_names_operator_axis_and_reason(plan: Plan, planner: autopar.Planner) -> None:
    entry = plan.operators["up/mm#0"]
    wrong = replace(entry, axes=(entry.axes[0], "heads"))
    read = replace(plan, operators={**plan.operators, "up/mm#0": wrong})
    with pytest.raises(PlanMismatchError, match=r"up/mm#0.*heads"):
        read.edit({})
    stored = replace(plan.parameters["up.bias"], stored=(autopar.Replicate(), autopar.Replicate()))
    read = replace(plan, parameters={**plan.parameters, "up.bias": stored})
    with pytest.raises(PlanMismatchError, match=r"up\.bias: stored R, used .*on dp_shard no choice"):
        read.edit({})


def test_a_model_that_is_gone_is_missed_by_name_and_answers_the_rest() -> None:
    found = autopar.plan(Mlp(), INPUTS, cluster=CLUSTER, mesh=(4,), optimizer=torch.optim.AdamW, with_baselines=False)
    assert found.memory().peak_bytes == pytest.approx(found.predicted.peak_bytes)
    with pytest.raises(ConfigurationError, match="is gone"):
        found.what_if(micro_batches=2)


def test_a_plan_beside_itself_is_equal_and_says_so(plan: Plan) -> None:
    found = plan.explain(vs=plan)
    assert isinstance(found, Comparison)
    assert "the plans are equal" in str(found)
    assert "where they part" not in str(found)


def test_operators_behind_the_last_module_are_the_loss(plan: Plan) -> None:
    assert isinstance(plan.origin, Remembered)
    nodes = list(plan.origin.source.program.graph.nodes)
    loss = loss_operators(nodes)
    assert loss
    assert all(name.startswith("/") for name in loss)
    assert any(name.endswith("/bwd") for name in loss)
    last = next(index for index, node in enumerate(nodes) if owner_of(node) == "down/mm#0")
    assert moment_of(nodes, last, loss) == "forward of down (mm)"
    first = next(index for index, node in enumerate(nodes) if owner_of(node) in loss)
    assert moment_of(nodes, first, loss).startswith("forward of the loss (")
