"""Block tables of a solved GPT: their sums are the simulated step, states and borders are counted by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from autopar.capture import capture
from autopar.cost_models.stage_costs import PASS_LAUNCHES
from autopar.demo.gpt import GPT, GPTConfig
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.one_mesh.mesh_plan import price, solve_free
from autopar.planner.one_mesh.predict import predict_timeline
from autopar.planner.one_mesh.query import Query, budget, kernel_backend
from autopar.planner.pipelines.block_costs import Solved, block_table, ways_of, weight_operators, weight_share
from autopar.planner.pipelines.block_table import BlockTable
from autopar.planner.pipelines.gradient_totals import adding_seconds
from autopar.planner.pipelines.runs import Runs, find_runs
from autopar.planner.problem.factorisation import Factorisation
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.planner.problem.prices import Prices
from autopar.planner.problem.search_limits import SEARCH
from autopar.program import Program
from autopar.request.constraints import parse_constraints

LAYERS, WIDTH, BATCH, LENGTH, VOCABULARY = 3, 32, 8, 16, 64


@dataclass(frozen=True)
class Made:
    """A solved program, its runs and its table."""

    program: Program
    query: Query
    solved: Solved
    runs: Runs
    table: BlockTable


@pytest.fixture(scope="module", params=["1 cpu", "2 cpu"])
def made(request: pytest.FixtureRequest) -> Made:
    model = GPT(GPTConfig(vocabulary=VOCABULARY, positions=LENGTH, width=WIDTH, heads=4, layers=LAYERS))
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return solved_program(capture(model, (tokens, tokens)), Cluster.parse(request.param), 4)


def solved_program(program: Program, cluster: Cluster, micro_batches: int) -> Made:
    """A program on one axis of all devices, with the table of its blocks."""
    query = Query(
        program=program,
        cluster=cluster,
        state_bytes=state_bytes(program, None),
        constraints=parse_constraints(None, None),
        budget_bytes=budget(None, cluster),
        kernel_backend=kernel_backend(cluster),
        factorisation=Factorisation(program),
        search=SEARCH["default"],
    )
    mesh = Mesh(("inner",), (cluster.num_devices,))
    built = price(query, mesh)
    lifetimes = Lifetimes(program)
    solved = Solved(
        built=built,
        labels=solve_free(query, built, mesh).assignment,
        mesh=mesh,
        prices=Prices(cluster, mesh),
        state_bytes=query.state_bytes,
        lifetimes=lifetimes,
        weights=weight_operators(program, lifetimes),
    )
    runs = find_runs(lifetimes)
    table = block_table(solved, ways_of(solved), runs, 1e9, lambda size: size * 1e-9, micro_batches)
    return Made(program, query, solved, runs, table)


@pytest.mark.exhaustive(sample="1 cpu")
def test_all_blocks_together_cost_the_simulated_step(made: Made) -> None:
    solved, table = made.solved, made.table
    step = predict_timeline(made.program, solved.built, solved.labels, solved.prices).makespan_seconds
    totals = sum(seconds for _, seconds in _totals(solved))
    assert table.seconds[0].sum() + table.once_seconds.sum() == pytest.approx(step + totals, rel=1e-9)


def _totals(solved: Solved) -> list[tuple[fx.Node, float]]:
    return list(adding_seconds(solved.built, solved.labels, solved.lifetimes, solved.prices))


def test_gradients_are_added_to_totals_but_for_products(made: Made) -> None:
    found = _totals(made.solved)
    assert all(source.target is not torch.ops.aten.mm.default for source, _ in found)
    assert 0 < len(found) < len(made.solved.lifetimes.gradient_position)


def test_what_the_host_does_counts_once_per_pass(made: Made) -> None:
    one, two = made.table.stage(1, 2, 0), made.table.stage(1, 3, 0)
    host = made.table.pass_seconds
    assert host == PASS_LAUNCHES * made.query.cluster.device.launch_seconds
    assert two.forward_seconds - host == pytest.approx(2 * (one.forward_seconds - host))


def test_a_block_that_is_left_out_is_caught(made: Made) -> None:
    """The mutation of the sum: one block fewer is no step."""
    solved, table = made.solved, made.table
    step = predict_timeline(made.program, solved.built, solved.labels, solved.prices).makespan_seconds
    step += sum(seconds for _, seconds in _totals(solved))
    assert table.seconds[0, 1:].sum() + table.once_seconds.sum() < 0.999 * step


def test_runs_are_the_blocks_and_what_lies_between(made: Made) -> None:
    assert made.runs.names == ("tokens, positions", "layers.0", "layers.1", "layers.2", "norm, head")
    assert made.runs.last_operators[1].startswith("layers.0/")


def test_equal_blocks_cost_the_same(made: Made) -> None:
    table = made.table
    for values in (table.forward_seconds, table.saved_bytes):
        np.testing.assert_allclose(values[:, 1:-1], values[:, 1:2].repeat(LAYERS, axis=1), rtol=1e-9)


def test_recomputation_costs_backward_and_saves_bytes(made: Made) -> None:
    table = made.table
    assert table.modes == ("none", "selective", "full")
    np.testing.assert_array_equal(table.forward_seconds[0], table.forward_seconds[2])
    again = table.backward_seconds[2, 2] - table.backward_seconds[0, 2]
    assert 0.5 * table.forward_seconds[0, 2] < again <= table.forward_seconds[0, 2] * (1 + 1e-9)
    assert table.saved_bytes[0, 2] > table.saved_bytes[1, 2] > table.saved_bytes[2, 2] > 0


def test_every_border_hands_on_the_hidden_state(made: Made) -> None:
    hidden = 4 * BATCH * LENGTH * WIDTH
    assert {round(hidden / size) for size in made.table.send_bytes} <= {1, made.query.cluster.num_devices}


def test_states_are_those_of_the_parameters(made: Made) -> None:
    """Weight, gradient and two moments of AdamW on one device; the gradient lives behind backward, so it counts."""
    if made.query.cluster.num_devices > 1:
        pytest.skip("layouts choose what two devices hold")
    of_block = sum(
        int(np.prod(entry.shape)) * 16
        for entry in made.program.inputs
        if entry.role == "parameter" and entry.name.startswith("layers.1.")
    )
    assert made.table.state_bytes[2] == of_block


class Returning(nn.Module):
    """forward(x (B, W)) -> loss and what it is made of, through three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).relu()
        return {"loss": x.pow(2).mean(), "hidden": x}


def test_the_last_stage_holds_what_is_returned_of_every_micro_batch() -> None:
    program = capture(Returning(), (torch.zeros(BATCH, WIDTH),))
    two, five = (solved_program(program, Cluster.parse("1 cpu"), count).table.state_bytes for count in (2, 5))
    more = five - two
    assert more[-1] == pytest.approx(3 * 4 * BATCH * WIDTH)
    assert not more[:-1].any()


def test_weight_gradients_are_a_third_of_a_block(made: Made) -> None:
    """Operators of W lead to one gradient: the products that make gradients of weights among them, and no attention."""
    names = {str(node.target) for node in made.solved.weights}
    assert "aten.mm.default" in names
    assert not any("attention" in name for name in names)
    table = made.table
    assert 0 < table.weight_seconds[0, 2] < table.backward_seconds[0, 2]


def test_outputs_and_micro_batches_leave_seconds_alone(made: Made) -> None:
    other = block_table(made.solved, ways_of(made.solved, ["none"]), made.runs, 1e9, lambda size: 0.0, 1)
    np.testing.assert_array_equal(other.forward_seconds[0], made.table.forward_seconds[0])
    assert not other.send_seconds.any()


def test_what_is_done_once_is_no_part_of_a_pass(made: Made) -> None:
    solved, each = made.solved, made.table
    once = block_table(solved, ways_of(solved), made.runs, 1e9, lambda size: size * 1e-9, 4, gather_once=True)
    assert once.seconds[0].sum() + once.once_seconds.sum() <= each.seconds[0].sum() + each.once_seconds.sum() + 1e-12
    assert (once.seconds <= each.seconds + 1e-12).all()
    assert (once.state_bytes >= each.state_bytes).all()
    if made.query.cluster.num_devices == 1:
        np.testing.assert_allclose(once.seconds, each.seconds, rtol=1e-12)  # there is nothing to gather


def test_gradients_of_a_convolution_are_half_of_its_backward() -> None:
    graph = fx.Graph()
    options = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    shares = []
    for mask in ([True, True, True], [False, True, True], [True, False, False]):
        operands = tuple(graph.placeholder(name) for name in ("dy", "x", "w"))
        node = graph.call_function(torch.ops.aten.convolution_backward.default, (*operands, *options, mask))
        shares.append(weight_share(node))
    assert shares == [0.5, 1.0, 0.0]
