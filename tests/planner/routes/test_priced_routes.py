"""What is priced is what is emitted, step by step; tables are the sums of steps; a finer mesh is never dearer."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx

from autopar.graphs.node_values import node_bytes
from autopar.hardware.cluster import Cluster
from autopar.layouts.moves import Way
from autopar.layouts.placement import Layout, Mesh, Partial, Placement, Replicate, Shard, is_legal, uneven_pieces
from autopar.layouts.redistribution import is_reachable, redistribution_steps, steps_on
from autopar.ops.blocks import piece, region
from autopar.passes.emitter import Emitter
from autopar.passes.lowering import emit_redistribution as emission
from autopar.planner.problem.prices import Prices
from autopar.planner.routes import fits, general_routes
from autopar.planner.routes.priced_routes import Routes
from autopar.planner.solver import FORBIDDEN
from tests.passes.local_blocks import layouts

MESHES = [
    (Mesh(("a",), (4,)), "4 CPU"),
    (Mesh(("a", "b"), (2, 2)), "4 H100"),
    (Mesh(("a", "b", "c"), (2, 4, 2)), "16 H100"),
    (Mesh(("a", "b", "c"), (2, 3, 2)), "12 CPU"),
]
SHAPES = [(24, 48), (16, 7, 32), (12, 36, 6), (30, 22), (64,), (96, 2, 24), (32, 32), (256, 144, 48)]
R, P = Replicate(), Partial("sum")


def sample(shape: tuple[int, ...], mesh: Mesh, count: int, seed: int) -> list[Layout]:
    """Random legal layouts, strided and uneven ones among them."""
    pick = random.Random(seed)
    menu: list[Placement] = [R, P, Partial("max")]
    menu += [Shard(dim, split) for dim, size in enumerate(shape) for split in (1, 2, 3, 4, 8) if size % split == 0]
    drawn = (tuple(pick.choice(menu) for _ in mesh.shape) for _ in range(40 * count))
    legal = [layout for layout in drawn if is_legal(shape, layout, mesh)]
    single = [layout for layout in legal if len({p.op for p in layout if isinstance(p, Partial)}) <= 1]
    return list(dict.fromkeys(single))[:count]


ITEMSIZE = 8
SIZES = [(4,), (1, 2), (2, 4), (2, 3), (2, 4, 2), (2, 1, 2)]
MOVED_SHAPES = [(96, 48), (16, 48, 32), (4096, 48, 96), (30, 22), (16, 7, 32), (12, 36, 10), (1024, 1030)]
C10D = torch.ops._c10d_functional
KINDS: Mapping[Callable[..., Any], str] = {
    C10D.all_gather_into_tensor.default: "all_gather",
    C10D.reduce_scatter_tensor.default: "reduce_scatter",
    C10D.all_reduce.default: "all_reduce",
    C10D.all_to_all_single.default: "all_to_all",
    region: "slice",
    piece: "slice",
}


class Moved(NamedTuple):
    """A step: the bytes of its full buffer on the fullest rank; a slice does not say over which axes."""

    kind: str
    axes: tuple[int, ...]
    nbytes: float


def as_priced(routes: Routes, shape: tuple[int, ...], source: Layout, target: Layout, mesh: Mesh) -> list[Moved]:
    """The steps that the planner's route of a pair takes."""

    def axes(bits: int) -> tuple[int, ...]:
        return tuple(axis for axis, size in enumerate(mesh.shape) if size > 1 and bits >> axis & 1)

    def ranks(bits: int) -> int:
        return math.prod(mesh.shape[axis] for axis in axes(bits))

    steps = routes.found.steps_of(int(routes.table(shape, [source], [target])[0, 0]))
    total = ITEMSIZE * math.prod(shape)
    found = [Moved(s.kind, axes(s.axes), total / ranks(s.cutting)) for s in steps if ranks(s.axes) > 1]
    return merged([move if move.kind != "slice" else move._replace(axes=()) for move in found])


def as_emitted(shape: tuple[int, ...], source: Layout, target: Layout, mesh: Mesh) -> list[Moved]:
    """The steps that the lowering writes for the first rank."""
    graph = fx.Graph()
    emit = Emitter(graph, mesh, 0)
    x = emit.describe(graph.placeholder("x"), emit.local_shape(shape, source), torch.float64)
    emission.emit_redistribution(emit, x, shape, source, target)
    found = []
    for node in graph.nodes:
        if node.target in KINDS:
            group = [mesh.axis_names.index(name) for name in node.meta.get("group_axes", ())]
            axes = tuple(axis for axis in group if mesh.shape[axis] > 1)
            found.append(Moved(KINDS[node.target], axes, node.meta.get("full_bytes") or node_bytes(node)))
    return merged(found)


def merged(steps: list[Moved]) -> list[Moved]:
    """Slices one behind the other as the last of them: plain and strided dims are cut by calls of their own."""
    return [
        step
        for step, after in itertools.zip_longest(steps, steps[1:])
        if after is None or step.kind != "slice" or after.kind != "slice"
    ]


def differences(routes: Routes, shape: tuple[int, ...], mesh: Mesh, seed: int, count: int = 24) -> Iterator[str]:
    """Pairs that are priced as other steps than are emitted. Blocks that do not divide are padded, so they may be
    larger than priced."""
    found = sample(shape, mesh, count, seed)
    for source, target in itertools.product(found, found):
        if is_reachable(source, target):
            priced = as_priced(routes, shape, source, target, mesh)
            emitted = as_emitted(shape, source, target, mesh)
            even = all(size % mesh.size == 0 for size in shape)
            most = 2.0 if not even or any(uneven_pieces(shape, end, mesh) for end in (source, target)) else 1.0
            if [step[:2] for step in priced] != [step[:2] for step in emitted] or not all(
                wanted.nbytes <= made.nbytes <= most * wanted.nbytes
                for wanted, made in zip(priced, emitted, strict=True)
            ):
                yield f"{source} -> {target} of {shape}: {priced} priced, {emitted} emitted"


@pytest.mark.exhaustive(every=7)
@pytest.mark.parametrize("shape", MOVED_SHAPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_priced_is_what_is_emitted(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh = Mesh(("a", "b", "c")[: len(sizes)], sizes)
    assert not list(differences(Routes(sizes), shape, mesh, seed=len(shape)))


def test_steps_that_only_the_lowering_takes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(("a", "b"), (2, 4))
    monkeypatch.setattr(emission, "redistribution_steps", lambda _, a, b, __: steps_on(Way.OVER_COMMON, a, b))
    assert any("all_to_all" in difference for difference in differences(Routes(mesh.shape), (64, 64), mesh, 0))


def test_bytes_that_only_the_planner_counts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general_routes, "_BUFFER_BEHIND", [])
    monkeypatch.setattr("autopar.planner.routes.priced_routes.general_routes", general_routes.GeneralRoutes)
    mesh = Mesh(("a", "b"), (2, 4))
    assert any("all_gather" in difference for difference in differences(Routes(mesh.shape), (64, 64), mesh, 0))


def wrong_entries(prices: Prices, shape: tuple[int, ...], nbytes: float, seed: int) -> Iterator[tuple[Layout, Layout]]:
    """Pairs whose entry is not what their emitted steps cost."""
    found = sample(shape, prices.mesh, 24, seed)
    sources, targets = found[:16], found[6:]
    table = prices.redistribution_table(shape, nbytes, sources, targets)
    for (i, source), (j, target) in itertools.product(enumerate(sources), enumerate(targets)):
        expected = FORBIDDEN
        if is_reachable(source, target):
            steps = redistribution_steps(shape, source, target, prices.mesh)
            expected = sum(prices.step_seconds(step, nbytes) for step in steps)
            expected += float(prices.tie_breaks @ [a != b for a, b in zip(source, target, strict=True)])
        if table[i, j] != pytest.approx(expected, rel=1e-12):
            yield source, target


@pytest.mark.parametrize(("mesh", "devices"), MESHES, ids=str)
def test_an_entry_is_the_sum_of_the_emitted_steps(mesh: Mesh, devices: str) -> None:
    prices = Prices(Cluster.parse(devices), mesh)
    for seed, shape in enumerate(SHAPES):
        for nbytes in (4096.0, 2.0**28):
            assert not list(wrong_entries(prices, shape, nbytes, seed)), shape


def test_an_axis_that_waits_in_the_first_dim_moves_whole_blocks() -> None:
    mesh, shape = Mesh(("a", "b", "c"), (4, 8, 8)), (4096, 4096)
    prices = Prices(Cluster.parse("256 H100"), mesh)
    source, target = (R, Shard(1), R), (Shard(1),) * 3
    steps = redistribution_steps(shape, source, target, mesh)
    assert any(Shard(0) in step.before for step in steps)
    expected = sum(prices.step_seconds(step, 2.0**25) for step in steps) + float(prices.tie_breaks @ [1, 0, 1])
    assert prices.redistribution_seconds(shape, 2.0**25, source, target) == pytest.approx(expected, rel=1e-12)


def test_general_routes_that_forget_sizes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits.PairFits, "verdicts", lambda self, source, *_: (source >= 0, source < 0))
    prices = Prices(Cluster.parse("12 CPU"), Mesh(("a", "b", "c"), (2, 3, 2)))
    prices._routes = Routes((2, 3, 2))
    assert any(list(wrong_entries(prices, shape, 2.0**28, seed)) for seed, shape in enumerate(SHAPES))


def test_meshes_of_so_many_axes_share_their_routes() -> None:
    whole = layouts((256, 256), Mesh(("a", "b"), (4, 4)), (1,), ("sum",))
    routes = [Routes(mesh_shape).table((256, 256), whole, whole) for mesh_shape in ((4, 4), (2, 8), (8, 2))]
    assert (routes[0] == routes[1]).all()
    assert (routes[0] == routes[2]).all()


@pytest.mark.parametrize("shape", [(16, 4096), (64,), (64, 16, 128)], ids=str)
def test_blocks_that_divide_evenly_take_general_routes(shape: tuple[int, ...]) -> None:
    """As small a dim as there are devices, too; what general routes do not know costs a search of its own per pair."""
    mesh = Mesh(("a", "b", "c"), (2, 2, 4))
    whole = layouts(shape, mesh, (1,), ("sum",))
    routes = Routes(mesh.shape)
    assert routes.table(shape, whole, whole).size > 500
    assert not routes._exact


def test_a_target_without_a_layout_is_forbidden() -> None:
    prices = Prices(Cluster.parse("4 CPU"), Mesh(("a",), (4,)))
    table = prices.redistribution_table((8, 8), 256.0, [(R,), (Shard(0),)], [None, (Shard(0),)])
    assert (table[:, 0] == FORBIDDEN).all()
    assert table[1, 1] == 0.0
    assert (prices.redistribution_table((8, 8), 256.0, [(R,)], [None]) == FORBIDDEN).all()


@pytest.mark.parametrize("finer", [(2, 4), (4, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (64, 8, 64)], ids=str)
def test_a_finer_mesh_over_equal_links_is_never_dearer(shape: tuple[int, ...], finer: tuple[int, ...]) -> None:
    cluster = Cluster.parse("8 H100")
    whole = layouts(shape, Mesh(("a",), (8,)), (1, 8), ("sum",))
    axes = len(finer)
    coarse = Prices(cluster, Mesh(("a",), (8,)))
    fine = Prices(cluster, Mesh(("a", "b", "c")[:axes], finer))
    for nbytes in (2.0**10, 2.0**20, 2.0**30):
        one = coarse.redistribution_table(shape, nbytes, whole, whole)
        repeated = [layout * axes for layout in whole]
        many = fine.redistribution_table(shape, nbytes, repeated, repeated)
        assert (many <= one * (1 + 1e-9)).all()
