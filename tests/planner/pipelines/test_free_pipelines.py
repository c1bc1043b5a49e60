"""Without a mesh, the search also looks at pipelines, and keeps what is predicted to be faster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.demo.gpt import GPT, GPTConfig
from autopar.errors import ConfigurationError, InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.memory.shortage import DoesNotFit
from autopar.planner.meshes.choose_mesh import Chosen
from autopar.planner.meshes.contenders import Plain, Work
from autopar.planner.meshes.solved_meshes import SolvedMeshes
from autopar.planner.pipelines import compared_pipelines, free_pipelines
from autopar.planner.pipelines.compared_pipelines import Compared
from autopar.planner.pipelines.free_pipelines import better_by_prediction
from autopar.planner.pipelines.pipeline_estimates import PipelineEstimate
from autopar.planner.search import best_plan
from autopar.plans.parallel_plan import Plan
from autopar.request.constraints import parse_constraints
from benchmarks.sub_meshes import sub_meshes

TOKENS = torch.zeros(4, 8, dtype=torch.long)


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    model = GPT(GPTConfig(vocabulary=16, positions=8, width=16, heads=2, layers=2))
    return autopar.plan(model, (TOKENS, TOKENS), cluster="2 cpu", dims={"pp": 2}, schedule="1f1b", micro_batches=2,
        with_baselines=False)


@pytest.mark.parametrize(("factor", "keeps_stages"), [(0.5, False), (2.0, True)])
def test_the_faster_by_prediction_is_kept(pipeline: Plan, factor: float, keeps_stages: bool) -> None:
    step = replace(pipeline.predicted, step_seconds=factor * pipeline.predicted.step_seconds)
    plain = replace(pipeline, pipeline=None, predicted=step, notes=())
    found = better_by_prediction(plain, pipeline, "")
    assert (found.pipeline is not None) == keeps_stages
    words = "without stages the best plan is predicted" if keeps_stages else "the best pipeline (pp=2) is predicted"
    assert found.notes[-1].startswith(words)


@pytest.mark.parametrize("bounds", [(0.3, 0.5), (0.5, 0.3)])
def test_the_bound_of_a_pipeline_is_that_of_all_that_was_compared(pipeline: Plan, bounds: tuple[float, float]) -> None:
    objective = pipeline.objective_seconds
    step = replace(pipeline.predicted, step_seconds=2.0 * pipeline.predicted.step_seconds)
    plain = replace(pipeline, pipeline=None, predicted=step, bound_seconds=bounds[0] * objective)
    found = better_by_prediction(plain, replace(pipeline, bound_seconds=bounds[1] * objective), "")
    assert found.bound_seconds == pytest.approx(0.3 * objective)
    assert found.gap == pytest.approx(0.7)
    assert found.alternatives[0].name == "without stages"
    assert found.alternatives[0].bound_seconds == bounds[0] * objective


def test_a_reason_against_pipelines_is_kept(pipeline: Plan) -> None:
    assert better_by_prediction(pipeline, None, "no loss").notes[-1] == "no pipeline: no loss"


@pytest.mark.exhaustive
def test_the_longest_search_tries_pipelines() -> None:
    model = GPT(GPTConfig(vocabulary=16, positions=8, width=16, heads=2, layers=2))
    plan = autopar.plan(model, (TOKENS, TOKENS), cluster="2 cpu", mode="max")
    assert any("pipeline" in note or "without stages" in note for note in plan.notes)


@pytest.mark.exhaustive
def test_several_nodes_make_the_default_search_compare_pipelines() -> None:
    model = GPT(GPTConfig(vocabulary=16, positions=8, width=16, heads=2, layers=2))
    options = {"cluster": "2x2 H100-SXM", "micro_batches": None}
    plan = autopar.plan(model, (TOKENS, TOKENS), **options)
    (compared,) = [note for note in plan.notes if note.startswith("pipelines compared")]
    assert "pp=4 x 1, 4 micro-batches: " in compared
    assert "None of them takes less than" in compared
    fast = autopar.plan(model, (TOKENS, TOKENS), mode="fast", **options)
    assert not any("pipeline" in note for note in fast.notes)


def test_one_node_with_memory_to_spare_does_not() -> None:
    model = GPT(GPTConfig(vocabulary=16, positions=8, width=16, heads=2, layers=2))
    plan = autopar.plan(model, (TOKENS, TOKENS), cluster="1x4 H100-SXM")
    assert not any("pipeline" in note for note in plan.notes)


@pytest.mark.exhaustive(sample="False")
@pytest.mark.parametrize("with_reason", [False, True])
def test_meshes_that_are_slower_than_a_pipeline_are_not_fitted(
    monkeypatch: pytest.MonkeyPatch, with_reason: bool
) -> None:
    """Where the best optimum does not fit, pipelines are compared first; here they are said to take no time at all."""
    compare = free_pipelines.FreePipelines._compared_seconds

    def no_time(self: free_pipelines.FreePipelines, plain: Plain) -> float:
        assert math.isfinite(compare(self, plain))
        return 0.0

    def cannot_be_cut(*_: object) -> Plan:
        raise ConfigurationError("the model cannot be cut")

    monkeypatch.setattr(compared_pipelines, "LIMITS", replace(compared_pipelines.LIMITS, slower_pipelines=math.inf))
    monkeypatch.setattr(SolvedMeshes, "_is_short", lambda *_: True)
    monkeypatch.setattr(free_pipelines.FreePipelines, "_compared_seconds", no_time)
    if with_reason:
        monkeypatch.setattr(free_pipelines, "write_compared", cannot_be_cut)
    model = GPT(GPTConfig(vocabulary=16, positions=8, width=16, heads=2, layers=2))
    plan = autopar.plan(model, (TOKENS, TOKENS), cluster="2x2 H100-SXM")
    assert (plan.pipeline is None) == with_reason
    if with_reason:
        assert any(note.startswith("pipelines compared") for note in plan.notes)
    else:
        assert any(note.startswith("without stages no plan was searched: of the ") for note in plan.notes)
        assert plan.alternatives[0].name.startswith("without stages, mesh ")
        assert plan.alternatives[0].bound_seconds is not None
        assert plan.bound_seconds <= plan.alternatives[0].bound_seconds
        assert {baseline.name for baseline in plan.baselines} >= {"DDP"}


@pytest.mark.exhaustive
def test_finer_meshes_are_left_out_where_a_pipeline_is_far_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step is said to be a tenth of the best optimum on two axes."""
    asked: list[float] = []

    step_before = free_pipelines.FreePipelines.step_before

    def tenth(self: free_pipelines.FreePipelines, work: Work, plain: Plain | None) -> float:
        if work != "finer meshes" or plain is None:
            return step_before(self, work, plain)
        asked.append(plain.seconds)
        return 0.1 * plain.seconds

    monkeypatch.setattr(free_pipelines.FreePipelines, "step_before", tenth)
    model = GPT(GPTConfig(vocabulary=16, positions=8, width=16, heads=2, layers=2))
    plan = autopar.plan(model, (TOKENS, TOKENS), cluster="2x4 H100-SXM")
    assert len(asked) == 1
    (left_out,) = [note for note in plan.notes if "axes were not tried: another answer takes" in note]
    assert left_out.startswith("1 mesh shapes of 3 axes")
    assert len(plan.mesh.shape) <= 2


def nothing_fits(*_: object, **__: object) -> Chosen:
    return Chosen(best=None, failures=(DoesNotFit(Mesh(("a",), (2,)), 2.0, 1.0, {}),))


@pytest.mark.parametrize("quick_fits", [True, False])
def test_where_nothing_without_stages_fits_a_pipeline_is_tried(
    monkeypatch: pytest.MonkeyPatch, quick_fits: bool
) -> None:
    model = GPT(GPTConfig(vocabulary=16, positions=8, width=16, heads=2, layers=2))
    monkeypatch.setattr(best_plan, "choose_mesh", nothing_fits)
    monkeypatch.setattr(best_plan, "choose_micro_batches", nothing_fits)
    if not quick_fits:
        monkeypatch.setattr(free_pipelines, "compare_pipelines", lambda *_: Compared())
    plan = autopar.plan(model, (TOKENS, TOKENS), cluster="2 cpu")
    assert plan.pipeline is not None
    assert plan.mesh.shape[0] == 2
    assert plan.predicted.peak_bytes <= plan.question["memory_limit_bytes"]
    assert plan.notes[-1].startswith("without stages nothing fits: no plan fits")


def test_a_fast_search_tries_none_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(GPTConfig(vocabulary=16, positions=8, width=16, heads=2, layers=2))
    monkeypatch.setattr(best_plan, "choose_mesh", nothing_fits)
    monkeypatch.setattr(best_plan, "choose_micro_batches", nothing_fits)
    with pytest.raises(InfeasibleError, match="no plan fits"):
        autopar.plan(model, (TOKENS, TOKENS), cluster="2 cpu", mode="fast")


@pytest.mark.exhaustive
def test_groups_whose_mesh_lacks_an_axis_that_a_constraint_names_are_left_out() -> None:
    model = GPT(GPTConfig(vocabulary=64, positions=8, width=32, heads=4, layers=2))
    plan = autopar.plan(
        model, (TOKENS, TOKENS), cluster="2x2 H100-SXM", mode="fast", constraints={"head.weight": {"outer": "S(0)"}}
    )
    assert "outer" in plan.mesh.axis_names
    shapes = sub_meshes(model, {"tokens": TOKENS, "labels": TOKENS}, Cluster.parse("2x4 H100-SXM"))
    constraints = parse_constraints({"head.weight": {"outer": "S(0)"}})
    shapes.query = replace(shapes.query, constraints=constraints)
    assert shapes.on_mesh(2, Mesh(("dp_replicate", "tp"), (2, 2))) is None
    assert shapes.on_mesh(2, Mesh(("inner",), (4,))) is None
    assert shapes.on_mesh(2, Mesh(("outer", "inner"), (2, 2))) is not None


@pytest.mark.exhaustive(sample="False")
@pytest.mark.parametrize("usual", [True, False])
def test_where_the_cheapest_layouts_do_not_fit_those_of_the_usual_names_are_tried(
    monkeypatch: pytest.MonkeyPatch, usual: bool
) -> None:
    """Cheapest is to cut samples over all devices of a group, each with all weights of its stages."""
    if not usual:
        monkeypatch.setattr(compared_pipelines, "USUAL_NAMES", {})
    model = GPT(GPTConfig(vocabulary=64, positions=32, width=128, heads=4, layers=2))
    tokens = torch.zeros(64, 32, dtype=torch.long)
    cluster, compared = Cluster.parse("2x4 H100-SXM"), Compared()
    shapes = sub_meshes(model, {"tokens": tokens, "labels": tokens}, cluster, "8MiB")
    estimate = PipelineEstimate(groups=2, count=2, mesh=Mesh(("outer", "inner"), (2, 2)), seconds=1.0)
    compared_pipelines._compare(compared, shapes, estimate, math.inf)
    (outcome,) = compared.tried
    assert outcome.does_not_fit == (not usual)
    if usual:
        assert isinstance(compared.best, tuple)
        pipeline, sub = compared.best
        assert sub.solved.mesh.axis_names == ("dp_replicate", "tp")
        assert pipeline.peak_bytes <= 8 << 20
