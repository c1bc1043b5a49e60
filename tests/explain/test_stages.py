"""What a plan with stages says of itself is what its stages, lowered and played, say."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.cost_models.program_costs import COMPUTE
from autopar.errors import ConfigurationError, InfeasibleError
from autopar.explain.answers import Comparison, Explanations
from autopar.explain.asked_step import AskedStep, asked_step
from autopar.explain.held_memory import KEPT, HeldMemory
from autopar.explain.memory_over_time import memory_over_time
from autopar.explain.origin import Remembered
from autopar.explain.repeated_block import repeated_block
from autopar.plans.parallel_plan import Plan
from autopar.report.html.stage_grid import stage_grid
from autopar.report.html.step_shares import step_shares
from autopar.report.html.timeline import RecordedStep
from autopar.simulation.played_plan import Simulation, simulate_plan
from autopar.simulation.step_program import StepProgram

WIDTH = 256
INPUTS = (torch.randn(32, WIDTH), torch.zeros(32, dtype=torch.long))


class Blocks(torch.nn.Module):
    """forward(x (B, 256), y (B,)) -> cross entropy over 48 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = torch.nn.Linear(WIDTH, 48)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return torch.nn.functional.cross_entropy(self.head(x), y)


@pytest.fixture(scope="module")
def planner() -> autopar.Planner:
    return autopar.Planner(Blocks(), INPUTS, cluster="4 H100-SXM", optimizer=torch.optim.AdamW)


@pytest.fixture(scope="module")
def plan(planner: autopar.Planner) -> Plan:
    return planner.plan(dims={"pp": 2, "tp": 2}, micro_batches=4, schedule="1f1b")


@pytest.fixture(scope="module")
def halves(planner: autopar.Planner) -> Plan:
    return planner.plan(dims={"pp": 2, "dp_shard": 2}, micro_batches=4, schedule="zb-h1")


@pytest.fixture(scope="module")
def unequal(planner: autopar.Planner) -> Plan:
    return planner.plan(dims={"pp": [1, 3]}, micro_batches=4)


def asked(plan: Plan) -> AskedStep:
    assert isinstance(plan.origin, Remembered)
    return asked_step(plan.origin.source, plan)


def played(plan: Plan) -> Simulation:
    parts = asked(plan)
    return simulate_plan(plan, parts.program, parts.cluster, torch.optim.AdamW)


@pytest.mark.exhaustive(sample="unequal")
@pytest.mark.parametrize("name", ["plan", "halves", "unequal"])
def test_every_pipeline_is_played_and_holds_what_its_table_says(name: str, request: pytest.FixtureRequest) -> None:
    found: Plan = request.getfixturevalue(name)
    simulation = played(found)
    assert simulation.step_seconds == pytest.approx(found.predicted.step_seconds, rel=0.25)
    for number, group in enumerate(found.rank_groups):
        table = found.memory(group.first_rank)
        assert table.peak_bytes == pytest.approx(simulation.peak_bytes[number], rel=1e-9)
        assert math.fsum(table.by_kind.values()) == pytest.approx(table.peak_bytes)
        assert math.fsum(table.by_module.values()) == pytest.approx(table.peak_bytes)
        assert max(size for _, size in table.over_time) == pytest.approx(table.peak_bytes)
    tightest = found.memory()
    assert tightest.peak_bytes == max(simulation.peak_bytes)
    assert_pictures_say_the_same(found, simulation)
    assert [stage.stage for stage in sorted(tightest.stages, key=lambda s: s.stage)] == [0, 1]
    assert "micro-batches in flight" in str(tightest)
    json.dumps(tightest.document())


def assert_pictures_say_the_same(plan: Plan, simulation: Simulation) -> None:
    """Memory by kind reaches the simulated peaks, the grid ends with the step, its gaps are the bubbles."""
    step, timeline = RecordedStep.of(simulation.timeline), simulation.timeline
    over_time = memory_over_time(asked(plan).step, timeline)
    assert [one.peak_bytes for one in over_time] == [pytest.approx(peak, rel=1e-9) for peak in simulation.peak_bytes]
    assert [one.rank for one in over_time] == [group.first_rank for group in plan.rank_groups]
    for one in over_time:
        starts = [start for start, _ in one.moments]
        assert starts == sorted(starts)
    assert_block_holds_all_its_kernels(asked(plan).step)
    grid, shares = stage_grid(step), step_shares(step)
    assert grid is not None
    assert max(cell.x + cell.width for row in grid.rows for cell in row.cells) == pytest.approx(grid.width, abs=0.02)
    for row, passes in zip(grid.rows, plan.staged.built(plan.micro_batches).ranks, strict=True):
        assert sorted(row.order.split()) == sorted(map(str, passes))
    assert shares.bubble == pytest.approx(simulation.bubble_rate)
    assert shares.exposed_seconds == pytest.approx(simulation.exposed_communication_seconds)
    assert shares.computing + shares.exposed + shares.bubble == pytest.approx(1.0)


def assert_block_holds_all_its_kernels(step: StepProgram) -> None:
    """And its collectives: what the bodies of its stage take under its name."""
    block = repeated_block(step)
    assert block is not None
    assert (block.pattern, block.count, block.name) == ("layers.*", 4, "layers.2")
    graphs = step.graphs
    bodies = [body for stage in graphs.of for body in step.bodies(stage, graphs.passes.kinds(stage.number))]
    inside = [one for body in bodies for one in body.actions if one.name.startswith(("layers.2.", "layers.2/"))]
    assert block.seconds == pytest.approx(math.fsum(one.seconds for one in inside), rel=1e-9)
    collectives = [one for part in block.parts for one in part.collectives]
    assert len(collectives) == sum(one.stream != COMPUTE for one in inside)
    assert all(part.reads for part in block.parts[1:]), "weights that are gathered once per step make no part"


def test_the_peak_of_a_table_follows_what_is_in_flight(plan: Plan) -> None:
    assert plan.pipeline is not None
    first = {stage.stage: stage for stage in plan.memory().stages}[0]
    assert first.in_flight == 2
    gpipe = replace(plan, pipeline=replace(plan.pipeline, schedule="gpipe"))
    all_of_them = {stage.stage: stage for stage in gpipe.memory().stages}[0]
    assert all_of_them.in_flight == 4
    assert all_of_them.activation_bytes == pytest.approx(2 * first.activation_bytes)


def test_halves_of_backward_keep_values_for_the_weights(halves: Plan) -> None:
    assert {name[1] for name, _ in halves.memory().over_time if name[0] == "0"} >= {"F", "I", "W"}
    assert KEPT not in halves.memory().by_kind or halves.memory().by_kind[KEPT] > 0


def test_pieces_of_every_moment_of_every_pass_add_up(halves: Plan) -> None:
    step = asked(halves).step
    held = HeldMemory(step, step.graphs, group=0)
    kinds = {moment.action.kind for moment in held.moments if moment.action is not None}
    assert {"F", "I", "W"} <= kinds
    for moment in held.moments_in(4):
        pieces = math.fsum(size for _, _, size in held.pieces(moment))
        assert pieces == pytest.approx(held.constant + moment.bytes)


def test_the_second_half_of_backward_begins_with_what_the_first_keeps_and_leaves_nothing(halves: Plan) -> None:
    for stage in asked(halves).step.graphs.of:
        inputs, weights = stage.bytes_of_halves
        assert inputs.before == stage.bytes_of_passes[0].after
        assert 0.0 < inputs.after == weights.before <= weights.live[0]
        assert weights.live[-1] < weights.live[0]
        assert weights.after == 0.0


def test_devices_of_several_kinds_are_played_each_at_its_own_prices() -> None:
    cluster = "1x2 H100-SXM + 1x2 A100-80"
    planner = autopar.Planner(Blocks(), INPUTS, cluster=cluster, optimizer=torch.optim.AdamW)
    mixed = planner.plan(micro_batches=4)
    simulation = played(mixed)
    assert simulation.step_seconds == pytest.approx(mixed.predicted.step_seconds, rel=0.25)
    assert mixed.memory().peak_bytes == pytest.approx(max(simulation.peak_bytes), rel=1e-9)


def test_a_rank_that_is_none_is_refused(plan: Plan) -> None:
    with pytest.raises(ConfigurationError, match="ranks 0 to 3"):
        plan.memory(rank=4)


@pytest.mark.parametrize("name", ["plan", "halves", "unequal"])
def test_code_shows_schedule_messages_and_bodies(name: str, request: pytest.FixtureRequest) -> None:
    found: Plan = request.getfixturevalue(name)
    assert found.pipeline is not None
    schedule = found.pipeline.built(found.micro_batches)
    codes = [found.code(group.first_rank) for group in found.rank_groups]
    for group, code in enumerate(codes):
        lines = str(code).splitlines()
        said = [line.split("#")[1].split()[0] for line in lines if line.startswith("    ") and "_batch" not in line
                and line.strip().partition("_")[0] in ("forward", "backward", "last") and "#" in line]  # fmt: skip
        assert said == [str(action) for action in schedule.ranks[group]]
        compile(str(code).split("\n\n\n")[0], "step", "exec")
        assert any("aten.mm(" in line and "/mm#0" in line for line in lines)
    sends = [line.split("#")[0].strip() for line in str(codes[0]).splitlines() if line.strip().startswith("send(")]
    gets = [line.split("#")[0].strip() for line in str(codes[1]).splitlines() if line.strip().startswith("receive(")]
    assert [line.removeprefix("send") for line in sends] == [line.removeprefix("receive") for line in gets]
    assert len(sends) == found.micro_batches
    longest = max(code.seconds for code in codes)
    assert 0.3 * found.predicted.step_seconds < longest <= played(found).step_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("one", "two"), [("plan", "halves"), ("halves", "unequal"), ("plan", "ddp"), ("plain", "plan")]
)
def test_differences_of_pipelines_add_up_to_the_difference_of_the_simulated_steps(
    one: str, two: str, request: pytest.FixtureRequest, planner: autopar.Planner
) -> None:
    this: Plan = planner.plan(dims={"tp": 4}) if one == "plain" else request.getfixturevalue(one)
    other = two if two == "ddp" else request.getfixturevalue(two)
    found = this.explain(vs=other)
    assert isinstance(found, Comparison)
    assert found.is_played
    steps = found.objective_seconds
    assert math.fsum(d.total for d in found.differences) == pytest.approx(steps[0] - steps[1], rel=1e-6)
    if this.pipeline is not None:
        assert steps[0] == pytest.approx(played(this).step_seconds)
    schedule = next(d for d in found.differences if d.pattern == "(schedule)")
    assert schedule.choices is not None
    assert {"compute", "optimizer"} <= found.by_label().keys()
    json.dumps(found.document())


def test_a_pipeline_does_not_part_from_itself_and_a_changed_schedule_is_all_that_differs(plan: Plan) -> None:
    same = plan.explain(vs=plan)
    assert isinstance(same, Comparison)
    assert same.differences == ()
    assert plan.pipeline is not None
    gpipe = replace(plan, pipeline=replace(plan.pipeline, schedule="gpipe"))
    found = plan.explain(vs=gpipe)
    assert isinstance(found, Comparison)
    assert {d.pattern for d in found.differences} == {"(schedule)"}


def test_an_edit_without_changes_is_the_plan_at_its_own_step(plan: Plan, halves: Plan) -> None:
    for each in (plan, halves):
        again = each.edit({})
        assert again.predicted == each.predicted
        assert again.pipeline == each.pipeline
        assert again.parameters == each.parameters


def test_edits_of_layout_schedule_micro_batches_and_stage_are_priced_again(plan: Plan) -> None:
    assert plan.pipeline is not None
    gpipe = plan.edit({"schedule": "gpipe"})
    assert gpipe.pipeline is not None
    assert gpipe.pipeline.schedule == "gpipe"
    assert [each.memory().stages[0].in_flight for each in (gpipe, plan)] == [4, 2]
    more = plan.edit({"micro_batches": 8})
    assert more.micro_batches == 8
    assert played(more).step_seconds == pytest.approx(more.predicted.step_seconds, rel=0.25)
    name = next(n for n, p in plan.parameters.items() if n.endswith("0.weight") and any(map(is_shard, p.stored)))
    whole = plan.edit({name: {"tp": "R"}})
    assert str(whole.parameters[name].stored[0]) == "R"
    others = [n for n in plan.parameters if n.split(".")[1] != name.split(".")[1]]
    assert all(whole.parameters[n] == plan.parameters[n] for n in others)
    cut = plan.pipeline.stages[0].last_operator
    assert cut is not None
    moved = plan.edit({"layers.0": {"pp": 0}, "layers.3": {"pp": 1}, "layers.1": {"pp": 1}})
    assert moved.pipeline is not None
    assert moved.pipeline.stages[0].name.startswith("layers.0")
    assert moved.bound_seconds <= moved.predicted.step_seconds
    assert "edited by hand" in moved.notes[-1]
    found = moved.explain(vs=plan)
    assert isinstance(found, Comparison)
    assert found.objective_seconds[0] == pytest.approx(played(moved).step_seconds)


def is_shard(placement: object) -> bool:
    return isinstance(placement, autopar.Shard)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers.0.0.weight": "S(7)"}, r"layers\.0\.0\.weight cannot be stored or made S\(7\)"),
        ({"layers.0": {"pp": 2}}, "stages 0 to 1"),
        ({"layers.0": {"pp": 1}}, "stage 0 would have no block left"),
        ({"schedule": "zb-v"}, r"zb-v has 2 stages per rank group, the plan 1: ask what_if"),
        ({"schedule": "searched"}, "name a family"),
        ({"schedule": "2f2b"}, "write one of"),
        ({"micro_batches": 0}, "a whole number of at least 1"),
        ({"layers.0.0.weight": {"dp": "R"}}, "names axis 'dp'; the mesh has tp"),
    ],
)
def test_an_edit_of_stages_that_makes_no_sense_is_refused_by_name(
    plan: Plan, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        plan.edit(changes)


def test_what_cannot_be_edited_is_refused_with_the_next_step(
    plan: Plan, unequal: Plan, planner: autopar.Planner
) -> None:
    with pytest.raises(ConfigurationError, match="what_if"):
        unequal.edit({"schedule": "gpipe"})
    with pytest.raises(ConfigurationError, match="this plan has none"):
        planner.plan(dims={"tp": 4}).edit({"schedule": "gpipe"})
    limit = 0.999 * plan.predicted.peak_bytes
    tight = planner.bind(replace(plan, origin=None), dims={"pp": 2, "tp": 2}, memory_limit=limit)
    with pytest.raises(InfeasibleError, match=r"ranks 0 to 1 \(rank group 0\)"):
        tight.edit({"schedule": "gpipe"})


def test_a_choice_is_explained_in_its_stage_with_costs_and_runner_up(plan: Plan) -> None:
    found = plan.explain("layers.3.0.weight")
    assert isinstance(found, Explanations)
    (choice,) = found.choices
    assert "in stage 1" in choice.notes[0]
    assert choice.switch is not None
    assert choice.switch.seconds >= -1e-12
    assert any("these stages would step in" in note for note in choice.notes)
    product = plan.explain("layers.0.0/addmm#0" if "layers.0.0/addmm#0" in plan.operators else "layers.0.0/mm#0")
    assert isinstance(product, Explanations)
    assert {term.kind for term in product.choices[0].terms} >= {"compute"}
    json.dumps(found.document())


def test_a_choice_on_unequal_groups_says_why_it_has_no_runner_up(unequal: Plan) -> None:
    found = unequal.explain("layers.0.0.weight")
    assert isinstance(found, Explanations)
    assert found.choices[0].switch is None
    assert any("unequal rank groups have a problem per group" in note for note in found.choices[0].notes)


def test_questions_about_one_plan_capture_its_micro_batch_once(plan: Plan) -> None:
    assert isinstance(plan.origin, Remembered)
    source = plan.origin.source
    parts = source.in_parts(plan)
    before = source.captures.traces + source.captures.computed
    plan.memory()
    plan.edit({"schedule": "gpipe"})
    plan.explain(vs=plan)
    assert source.captures.traces + source.captures.computed == before
    assert source.in_parts(plan) is parts


class Tied(torch.nn.Module):
    """forward(tokens (B, 16), y (B, 16)) -> cross entropy over the 2,048 rows of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(2048, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return torch.nn.functional.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), y.flatten())


def test_stages_that_share_a_weight_cast_it_themselves_and_add_up_its_gradients_once() -> None:
    tokens = torch.zeros(32, 16, dtype=torch.long)
    asked_for = {"cluster": "2x1 A100-80 @ 10Gb", "optimizer": torch.optim.AdamW, "precision": "bf16"}
    planner = autopar.Planner(Tied(), (tokens, tokens), **asked_for)
    found = planner.plan(dims={"pp": 2}, micro_batches=4)
    simulation = played(found)
    added = [action for action in simulation.timeline.actions if action.name == "shared gradients"]
    assert [action.rank for action in added] == [0, 1]
    assert added[0].seconds > 2048 * WIDTH * 4 / (10e9 / 8)
    assert found.predicted.step_seconds == pytest.approx(simulation.step_seconds, rel=0.1)
    forward = [crossing for crossing in asked(found).graphs().crossings if not crossing.is_backward]
    assert len(forward) == 1


def test_a_pipeline_without_backward_is_played_and_printed_forward_only() -> None:
    planner = autopar.Planner(Blocks().eval(), INPUTS, cluster="2 H100-SXM")
    found = planner.plan(dims={"pp": 2}, micro_batches=4, schedule="1f1b")
    passes = {action.name.split()[0] for action in played(found).timeline.actions}
    assert {"0F0", "1F3"} <= passes
    assert not any(name[1:2] == "B" for name in passes)
    assert "backward" not in str(found.code(0))
