"""Every pair of layouts, executed on simulated ranks and compared with the global tensor."""

import math
import random
from collections import Counter

import pytest
import torch
from torch import fx

from autopar.layouts import redistribution
from autopar.layouts.placement import Layout, Mesh, Partial, Replicate, Shard
from autopar.layouts.redistribution import is_reachable, redistribution_steps
from autopar.passes.emitter import Emitter
from autopar.passes.lowering.emit_redistribution import emit_redistribution
from tests.passes.local_blocks import assemble, distribute, layouts
from tests.simulated_ranks import run_ranks

FLAT, SQUARE, OBLONG = Mesh(("a",), (4,)), Mesh(("a", "b"), (2, 2)), Mesh(("a", "b"), (2, 3))
CUBE = Mesh(("a", "b", "c"), (2, 2, 2))
R, P = Replicate(), Partial("sum")


def redistribute_graphs(
    shape: tuple[int, ...], source: Layout, target: Layout, mesh: Mesh, dtype: torch.dtype = torch.float64
) -> list[fx.GraphModule]:
    """One graph per rank that redistributes its only input."""
    graphs = []
    for rank in range(mesh.size):
        graph = fx.Graph()
        emit = Emitter(graph, mesh, rank)
        x = emit.describe(graph.placeholder("x"), emit.local_shape(shape, source), dtype)
        y = emit_redistribution(emit, x, shape, source, target)
        assert y.meta["local_shape"] == emit.local_shape(shape, target)
        graph.output((y,))
        graphs.append(fx.GraphModule({}, graph))
    return graphs


def check(shape: tuple[int, ...], source: Layout, target: Layout, mesh: Mesh) -> None:
    x = torch.arange(1.0, 1.0 + math.prod(shape), dtype=torch.float64).reshape(shape)
    graphs = redistribute_graphs(shape, source, target, mesh)
    outputs = run_ranks(graphs, [[block] for block in distribute(x, source, mesh)], mesh)
    assert torch.equal(assemble([output[0] for output in outputs], shape, target, mesh), x), (source, target)


@pytest.mark.exhaustive(sample=["(6, 12)", "(7, 10)", "(2, 2)", "(22, 9)"])
@pytest.mark.parametrize(
    ("mesh", "shape", "splits", "partial"),
    [
        (FLAT, (8, 8), (1, 2), ("sum", "max")),
        (FLAT, (7, 10), (1,), ("sum", "min")),
        (FLAT, (6, 12), (1, 3), ("sum",)),
        (FLAT, (22, 7), (1, 2), ("sum", "max")),
        (OBLONG, (22, 9), (1, 2, 3), ("sum",)),
        (SQUARE, (8, 4), (1, 2, 4), ("sum",)),
        (SQUARE, (8, 12), (1, 2, 3), ("sum",)),
        (SQUARE, (7, 10), (1,), ("sum", "max")),
        (OBLONG, (12, 18), (1, 2, 3), ("sum",)),
        (OBLONG, (11, 8), (1, 2), ("sum",)),
        (OBLONG, (22, 7), (1,), ("sum",)),
    ],
    ids=str,
)
def test_every_pair_gives_the_target_block_of_the_same_tensor(mesh, shape, splits, partial):
    candidates = layouts(shape, mesh, splits, partial)
    pairs = [(a, b) for a in candidates for b in candidates if is_reachable(a, b)]
    assert len(pairs) > 10
    for source, target in pairs[:: max(1, len(pairs) // 150)]:
        check(shape, source, target, mesh)


@pytest.mark.parametrize(
    ("mesh", "shape", "splits", "zigzags", "checked"),
    [(FLAT, (16, 8), (1, 2), (2, 4), 300), (SQUARE, (16, 8), (1, 2), (2, 4), 300),
     (OBLONG, (24, 12), (1, 2), (2, 4), 150), (CUBE, (16, 32), (1, 2, 4), (2, 4), 150)],
    ids=str,
)  # fmt: skip
def test_blocks_in_zigzag_order_go_everywhere_and_come_from_everywhere(mesh, shape, splits, zigzags, checked):
    candidates = layouts(shape, mesh, splits, ("sum",), zigzags)
    turned = [layout for layout in candidates if any(isinstance(p, Shard) and p.zigzag for p in layout)]
    assert len(turned) > 2
    draw = random.Random(0)
    for _ in range(checked):
        ends = [draw.choice(turned), draw.choice(candidates)]
        draw.shuffle(ends)
        if is_reachable(*ends):
            check(shape, *ends, mesh)


@pytest.mark.exhaustive(sample=["(11, 14)", "(23, 8)"])
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "shape", "splits", "checked"),
    [
        (CUBE, (8, 8), (1,), 400),
        (CUBE, (16, 8), (1, 2, 4), 80),
        (CUBE, (11, 14), (1,), 80),
        (CUBE, (23, 8), (1, 2), 80),
        (Mesh(("a", "b", "c"), (2, 3, 2)), (24, 36), (1, 2, 3, 6), 80),
    ],
    ids=str,
)
def test_pairs_on_three_axes_give_the_target_block(mesh, shape, splits, checked):
    """Samples; the moves of every pair are checked in `test_moves.py`."""
    candidates = layouts(shape, mesh, splits, ("sum",))
    pairs = [(a, b) for a in candidates for b in candidates if is_reachable(a, b) and first_dim(a, b) == 0]
    for source, target in random.Random(0).sample(pairs, min(checked, len(pairs))):
        check(shape, source, target, mesh)


@pytest.mark.exhaustive(sample="('a', 'b'), ")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [SQUARE, CUBE], ids=str)
def test_pairs_in_which_an_axis_waits_give_the_target_block(mesh, monkeypatch):
    monkeypatch.setattr(redistribution, "WAITING_ELEMENTS", 1)
    shape = (16, 8, 24)  # no pair of this shape is known without waiting
    candidates = layouts(shape, mesh, (1, 2), ("sum",))
    pairs = [(a, b) for a in candidates for b in candidates if is_reachable(a, b)]
    waiting = [
        (a, b)
        for a, b in random.Random(0).sample(pairs, 3000)
        if (spare := redistribution.spare_factor(shape, a, b, mesh))
        and any(spare in step.after for step in redistribution_steps(shape, a, b, mesh))
    ]
    assert len(waiting) > 20
    for source, target in waiting[:60]:
        check(shape, source, target, mesh)


def test_an_axis_waits_in_a_spare_dim_of_a_large_tensor():
    source, target = (Shard(0), Shard(0)), (Shard(1), Shard(0))
    assert kinds((64, 64, 4), source, target, SQUARE) == ["all_gather", "slice"]
    assert kinds((256, 1024, 4), source, target, SQUARE) == ["all_to_all", "all_to_all", "all_to_all"]


def first_dim(source: Layout, target: Layout) -> int:
    return next((p.dim for p in (*source, *target) if isinstance(p, Shard)), 0)


def kinds(shape, source, target, mesh):
    return [step.kind for step in redistribution_steps(shape, source, target, mesh)]


def test_partial_to_shard_is_reduce_scatter():
    assert kinds((8, 4), (P, R), (Shard(1), R), SQUARE) == ["reduce_scatter"]


def test_gather_over_two_axes_is_one_collective():
    graph = redistribute_graphs((8, 4), (Shard(0), Shard(1)), (R, R), SQUARE)[0].graph
    groups = Counter(node.meta["group_axes"] for node in graph.nodes if "group_axes" in node.meta)
    assert groups == {("a", "b"): 1}


def test_axes_that_move_to_another_dim_together_are_one_all_to_all():
    assert kinds((8, 8), (Shard(0), Shard(0)), (Shard(1), Shard(1)), SQUARE) == ["all_to_all"]
    assert kinds((16, 8, 8), (Shard(0), Shard(1), R), (Shard(2), Shard(2), R), CUBE) == ["all_to_all"]


def test_slices_of_several_axes_are_one_copy():
    assert kinds((8, 8), (R, R, R), (Shard(0), Shard(1), Shard(0)), CUBE) == ["slice"]
    graph = redistribute_graphs((8, 8), (R, R, R), (Shard(0), Shard(1), Shard(0)), CUBE)[0].graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]


def test_uneven_dim_of_two_axes_is_gathered_axis_by_axis():
    assert kinds((22, 4), (Shard(0), Shard(0)), (R, R), Mesh(("a", "b"), (4, 2))) == ["all_gather", "all_gather"]
    check((22, 4), (Shard(0), Shard(0)), (R, R), Mesh(("a", "b"), (4, 2)))
    check((22, 4), (P, P), (Shard(0), Shard(0)), Mesh(("a", "b"), (4, 2)))


def test_two_spellings_of_one_layout_need_no_step():
    assert kinds((8,), (Shard(0), Shard(0, 2)), (Shard(0), Shard(0)), SQUARE) == []


def test_shard_to_other_dim_is_all_to_all_if_even_and_gather_with_slice_if_not():
    assert kinds((8, 4), (Shard(0),), (Shard(1),), FLAT) == ["all_to_all"]
    assert kinds((7, 10), (Shard(0),), (Shard(1),), FLAT) == ["all_gather", "slice"]


def test_axes_of_extent_one_cost_nothing():
    mesh = Mesh(("a", "b"), (1, 2))
    graph = redistribute_graphs((8, 4), (P, R), (Shard(0), R), mesh)[0].graph
    assert [node.op for node in graph.nodes] == ["placeholder", "output"]


def test_nothing_turns_into_a_partial():
    with pytest.raises(ValueError, match="Partial"):
        redistribution_steps((8,), (R,), (P,), FLAT)


def test_a_lost_trim_is_noticed():
    x = torch.arange(1.0, 8.0, dtype=torch.float64)
    graphs = redistribute_graphs((7,), (Shard(0),), (R,), FLAT)
    for graph in graphs:
        joined = next(n for n in graph.graph.nodes if "pieces_joined" in str(n.target))
        joined.args = (*joined.args[:3], (8,))
        graph.recompile()
    outputs = run_ranks(graphs, [[block] for block in distribute(x, (Shard(0),), FLAT)], FLAT)
    with pytest.raises(AssertionError):
        assemble([output[0] for output in outputs], (7,), (R,), FLAT)


@pytest.mark.parametrize("mesh", [FLAT, SQUARE], ids=str)
def test_complex_numbers_travel_as_pairs(mesh: Mesh) -> None:
    x = torch.arange(1.0, 65.0, dtype=torch.float64).reshape(8, 8)
    whole = torch.complex(x, -2.0 * x)
    candidates = layouts((8, 8), mesh, (1, 2), ("sum",))
    for source, target in [(a, b) for a in candidates for b in candidates if is_reachable(a, b)][::5]:
        graphs = redistribute_graphs((8, 8), source, target, mesh, torch.complex128)
        blocks = [
            [torch.complex(real, imaginary)]
            for real, imaginary in zip(
                distribute(whole.real, source, mesh), distribute(whole.imag, source, mesh), strict=True
            )
        ]
        outputs = [output[0] for output in run_ranks(graphs, blocks, mesh)]
        assert torch.equal(assemble([o.real for o in outputs], (8, 8), target, mesh), whole.real), (source, target)
        assert torch.equal(assemble([o.imag for o in outputs], (8, 8), target, mesh), whole.imag), (source, target)
