"""Collectives in buckets, started early and awaited late: same results on every rank, in one order of starts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import fx

from autopar.graphs.collective_nodes import REDUCE_SCATTER, WAIT, describe, is_start
from autopar.graphs.forward_backward import Partition
from autopar.graphs.live_ranges import memory_events
from autopar.layouts.placement import Mesh
from autopar.ops.buckets import packed, packed_rows, rows_part
from autopar.passes.overlap.early_starts import IN_FLIGHT
from tests.passes.lowering.test_lower import FLAT, SQUARE, Case, Mlp, all_replicated, data_parallel, random_plan, zero3

EVERYTHING = {"all_reduce": 1e9, "all_gather": 1e9, "reduce_scatter": 1e9}
SIZES: tuple[dict[str, float], ...] = ({}, dict.fromkeys(EVERYTHING, 300.0), EVERYTHING)


@pytest.fixture(scope="module")
def mlp() -> Case:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 6, dtype=torch.double), "y": torch.randn(8, 4, dtype=torch.double)}
    return Case(Mlp().double(), inputs)


def calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def starts(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in calls(module) if is_start(node)]


def backward_of(partition: Partition) -> fx.GraphModule:
    assert partition.backward is not None
    return partition.backward


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("parameter", [all_replicated, zero3])
def test_overlapped_steps_compute_the_same(mlp: Case, parameter: Any, sizes: dict[str, float]) -> None:
    mlp.check(data_parallel(mlp, FLAT, parameter), bucket_bytes=sizes)


@pytest.mark.exhaustive(sample="mesh2")
@pytest.mark.parametrize("mesh", [FLAT, SQUARE, Mesh(("tp",), (3,)), Mesh(("dp", "tp"), (2, 3))])
def test_any_plan_overlapped_computes_the_same_on_uneven_blocks_too(mlp: Case, mesh: Mesh) -> None:
    for seed in range(6):
        sizes = random.Random(seed).choice(SIZES)
        mlp.check(random_plan(mlp, mesh, seed), bucket_bytes=sizes)


def test_gradients_are_reduced_in_one_bucket_behind_all_of_backward(mlp: Case) -> None:
    back = backward_of(mlp.check(data_parallel(mlp, FLAT, all_replicated), bucket_bytes=EVERYTHING).partitions[0])
    assert len(starts(back)) == 1
    position = calls(back).index(starts(back)[0])
    assert calls(back)[position - 1].target is packed
    assert calls(back)[position + 1].target is WAIT


def test_without_buckets_each_gradient_is_started_where_it_is_made_and_awaited_at_the_end(mlp: Case) -> None:
    back = backward_of(mlp.check(data_parallel(mlp, FLAT, all_replicated), bucket_bytes={}).partitions[0])
    order = [node.target for node in calls(back)]
    first_wait = order.index(WAIT)
    assert len(starts(back)) == 4
    assert set(order[first_wait:]) == {WAIT, torch.ops.aten.reshape.default}
    for start in starts(back):  # nothing that computes stands between a gradient and its start
        (maker,) = describe(calls(back)).makers[start]
        between = order[calls(back).index(maker) + 1 : calls(back).index(start)]
        assert set(between) <= {torch.ops.aten.contiguous.default, torch.ops.aten.reshape.default, start.target}


def test_one_gather_is_ahead_of_the_one_that_is_read(mlp: Case) -> None:
    forward = mlp.check(data_parallel(mlp, FLAT, zero3), bucket_bytes={}).partitions[0].forward
    gathers = [node for node in starts(forward) if "all_gather" in str(node.target)]
    order = {node: index for index, node in enumerate(calls(forward))}
    waits = [next(user for user in gather.users) for gather in gathers]
    assert len(gathers) == 4
    for index in range(1, len(gathers)):
        assert order[waits[index - 1]] < order[gathers[index]] < order[waits[index]]
        if index + 1 < len(gathers):
            assert order[gathers[index + 1]] > order[waits[index]]  # no more than one


def test_few_scatters_are_in_flight(mlp: Case) -> None:
    back = backward_of(mlp.check(data_parallel(mlp, FLAT, zero3), bucket_bytes={}).partitions[0])
    flying = most = 0
    for node in calls(back):
        flying += node.target is REDUCE_SCATTER
        flying -= node.target is WAIT and node.all_input_nodes[0].target is REDUCE_SCATTER
        most = max(most, flying)
    assert most == IN_FLIGHT


def test_all_ranks_start_in_one_order(mlp: Case) -> None:
    mesh = Mesh(("dp", "tp"), (2, 3))
    for seed in range(4):
        parts = mlp.check(random_plan(mlp, mesh, seed), bucket_bytes=SIZES[1]).partitions
        for phase in ("forward", "backward"):
            orders = {tuple((n.target, n.args[1:]) for n in starts(getattr(part, phase))) for part in parts}
            assert len(orders) == 1, (seed, phase)


def test_a_part_that_is_taken_at_another_place_is_noticed(mlp: Case) -> None:
    def move(module: fx.GraphModule) -> None:
        for node in calls(module):
            if node.target is rows_part and node.args[2]:
                node.args = (*node.args[:2], node.args[2] - 1, node.args[3])
                return

    errors, _ = mlp.errors(data_parallel(mlp, FLAT, zero3), bucket_bytes=EVERYTHING, change=move)
    assert max(errors.values()) > 1e-3


def test_ranks_with_other_buckets_are_noticed(mlp: Case) -> None:
    plan = data_parallel(mlp, FLAT, all_replicated)
    changed: list[fx.GraphModule] = []

    def swap(module: fx.GraphModule) -> None:
        for node in calls(module) if not changed else ():
            if node.target is packed:
                changed.append(module)
                node.args = (list(reversed(node.args[0])),)

    errors, _ = mlp.errors(plan, bucket_bytes=EVERYTHING, change=swap)
    assert max(errors.values()) > 1e-3


def test_rows_hold_a_piece_of_every_tensor_for_every_rank() -> None:
    a, b = torch.arange(12.0).view(4, 3), torch.arange(2.0) + 20
    rows = packed_rows([a, b], 2)
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 20, 6, 7, 8, 9, 10, 11, 21]
    assert torch.equal(rows_part(rows, 2, 0, (4, 3)), a)
    assert torch.equal(rows_part(rows, 2, 6, (2,)), b)


def test_what_a_gather_moves_lives_until_its_wait(mlp: Case) -> None:
    partition = mlp.check(data_parallel(mlp, FLAT, zero3), bucket_bytes=EVERYTHING).partitions[0]
    order = {node.name: index for index, node in enumerate(partition.forward.graph.nodes)}
    ranges = {live.name: live for live in memory_events(partition)}
    gather = next(node for node in starts(partition.forward) if "all_gather" in str(node.target))
    (wait,) = gather.users
    assert ranges[gather.all_input_nodes[0].name].last_index == order[wait.name]
