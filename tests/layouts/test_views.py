"""Layouts through views against sets of global indices, which know nothing of positions and splits."""

import math

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autopar.layouts.placement import Mesh, Partial, Replicate, Shard, is_legal
from autopar.layouts.views import canonical, dimension_groups, reshape_layout
from tests.passes.local_blocks import block_of

R = Replicate()
MESHES = [
    Mesh(("a",), (2,)),
    Mesh(("a",), (4,)),
    Mesh(("a", "b"), (2, 2)),
    Mesh(("a", "b"), (2, 3)),
    Mesh(("a", "b"), (1, 2)),
]
FACTORS = [1, 2, 2, 3, 4, 5]


@st.composite
def reshapes(draw):
    """(source shape, target shape, layout of source, mesh): two groupings of one list of factors."""
    factors = draw(st.lists(st.sampled_from(FACTORS), min_size=1, max_size=5))
    mesh = draw(st.sampled_from(MESHES))
    source, target = grouped(draw, factors), grouped(draw, factors)
    placements = [
        R,
        Partial(),
        *(Shard(d, s) for d, size in enumerate(source) for s in (1, 2, 3, 4, 6) if size % s == 0),
        *(Shard(d, s, zigzag=True) for d, size in enumerate(source) for s in (2, 4, 6) if size % s == 0),
    ]
    layout = tuple(draw(st.sampled_from(placements)) for _ in mesh.shape)
    return source, target, layout, mesh


def grouped(draw, factors):
    shape, rest = [], list(factors)
    while rest:
        count = draw(st.integers(1, len(rest)))
        shape.append(math.prod(rest[:count]))
        rest = rest[count:]
    return tuple(shape)


def held(shape, layout, mesh):
    """What every rank holds, as the flat list of global positions in local order."""
    positions = torch.arange(math.prod(shape)).reshape(shape)
    return [block_of(positions, layout, mesh, rank).flatten().tolist() for rank in range(mesh.size)]


@settings(max_examples=150, deadline=None)
@given(reshapes())
def test_a_mapped_layout_gives_every_rank_the_same_elements_in_the_same_order(case):
    source, target, layout, mesh = case
    assume(is_legal(source, layout, mesh))
    mapped = reshape_layout(source, target, layout, mesh.shape)
    if mapped is not None:
        assert is_legal(target, mapped, mesh)
        assert held(source, layout, mesh) == held(target, mapped, mesh)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])  # most have an image
@given(reshapes())
def test_a_layout_without_image_really_has_none(case):
    source, target, layout, mesh = case
    assume(is_legal(source, layout, mesh) and reshape_layout(source, target, layout, mesh.shape) is None)
    wanted = held(source, layout, mesh)
    # cut unevenly: no image, also where blocks happen to agree
    assume(len({len(elements) for elements in wanted}) == 1)
    for other in single_splits(target, layout, mesh):
        assert held(target, other, mesh) != wanted, other


def single_splits(shape, like, mesh):
    """All legal layouts of `shape` with Shards on the axes where `like` has them."""
    found = [()]
    for placement in like:
        options = [Shard(d, s) for d, size in enumerate(shape) for s in range(1, size + 1) if size % s == 0]
        options += [Shard(d, s, True) for d, size in enumerate(shape) for s in range(2, size + 1, 2) if size % s == 0]
        found = [(*head, p) for head in found for p in (options if isinstance(placement, Shard) else [placement])]
    return [layout for layout in found if is_legal(shape, layout, mesh)]


@settings(max_examples=100, deadline=None)
@given(reshapes())
def test_the_canonical_layout_places_equally_and_is_unique_per_view(case):
    shape, target, layout, mesh = case
    assume(is_legal(shape, layout, mesh))
    spelled = canonical(shape, layout, mesh.shape)
    assert held(shape, spelled, mesh) == held(shape, layout, mesh)
    assert canonical(shape, spelled, mesh.shape) == spelled
    there = reshape_layout(shape, target, spelled, mesh.shape)
    if there is not None and 1 not in mesh.shape:
        assert reshape_layout(target, shape, there, mesh.shape) == spelled


def test_examples_of_the_module_docstring():
    assert reshape_layout((8, 6), (48,), (Shard(1),), (2,)) == (Shard(0, 8),)
    assert reshape_layout((12,), (3, 4), (Shard(0),), (3,)) == (Shard(0),)
    assert reshape_layout((12,), (3, 4), (Shard(0),), (2,)) is None
    assert reshape_layout((16,), (2, 8), (Shard(0), Shard(0)), (2, 4)) == (Shard(0), Shard(1))


def test_uneven_dims_pass_only_where_they_are_alone():
    assert reshape_layout((7, 6), (1, 7, 2, 3), (Shard(0),), (4,)) == (Shard(1),)
    assert reshape_layout((7, 6), (42,), (Shard(0),), (4,)) is None
    assert reshape_layout((30,), (15, 2), (Shard(0),), (4,)) is None  # though 8 elements are 4 rows on three ranks
    assert reshape_layout((2, 15), (30,), (Shard(1),), (4,)) == (Shard(0, 2),)
    assert reshape_layout((2, 15, 4), (30, 4), (Shard(0), Shard(1)), (2, 4)) == (Shard(0), Shard(0))
    assert reshape_layout((30, 4), (2, 15, 4), (Shard(0), Shard(0)), (2, 4)) == (Shard(0), Shard(1))
    assert reshape_layout((2, 15), (2, 3, 5), (Shard(1),), (4,)) is None


def test_groups_ignore_dims_of_size_one():
    assert dimension_groups((2, 1, 3, 4), (6, 4, 1)) == (((0, 2), (0,)), ((3,), (1,)))
