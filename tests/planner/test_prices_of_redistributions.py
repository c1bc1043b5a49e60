"""Tables of redistributions are the sum of the steps that the lowering emits, and a finer mesh is never dearer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.layouts.placement import Layout, Mesh, Partial, Placement, Replicate, Shard, is_legal
from autopar.layouts.redistribution import is_reachable
from autopar.passes.emit_redistribution import redistribution_steps
from autopar.planner import fits, pair_classes
from autopar.planner.pair_classes import PairClasses, Pairs
from autopar.planner.prices import Prices
from autopar.planner.routes import Routes
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


def test_classes_that_forget_sizes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def roomy(dim: int, size: int, splits: list[int], ranks: int) -> dict[Shard, pair_classes.Factor]:
        return {Shard(dim, split): pair_classes.Factor(dim, dim == 0, ranks**3, 1) for split in splits}

    monkeypatch.setattr(pair_classes, "plain_dim", roomy)
    prices = Prices(Cluster.parse("12 CPU"), Mesh(("a", "b", "c"), (2, 3, 2)))
    prices._routes = Routes((2, 3, 2))
    assert any(list(wrong_entries(prices, shape, 2.0**28, seed)) for seed, shape in enumerate(SHAPES))


def code(classes: PairClasses, shape: tuple[int, ...], source: Layout, target: Layout) -> int:
    here = np.zeros(1, np.int64)
    return int(classes.codes(shape, Pairs([source], [target], here, here), here > 0)[0])


def test_pairs_that_differ_in_names_of_dims_are_one_class() -> None:
    classes = PairClasses((2, 2))
    first = code(classes, (8, 64), (Shard(1), R), (R, Shard(1)))
    assert first == code(classes, (8, 5, 192), (Shard(2), R), (R, Shard(2)))
    assert first != code(classes, (64, 8), (Shard(0), R), (R, Shard(0)))
    assert first != code(classes, (8, 16, 31), (Shard(2), R), (R, Shard(2)))


def test_a_class_has_a_representative_with_its_nesting() -> None:
    classes = PairClasses((2, 2))
    pair = classes.representative(code(classes, (8, 7, 64), (Shard(2), P), (R, Shard(2))))
    assert (pair.source, pair.target) == ((Shard(1), P), (R, Shard(1)))


def test_meshes_of_so_many_axes_share_their_routes() -> None:
    whole = layouts((256, 256), Mesh(("a", "b"), (4, 4)), (1,), ("sum",))
    routes = [Routes(mesh_shape).table((256, 256), whole, whole) for mesh_shape in ((4, 4), (2, 8), (8, 2))]
    assert (routes[0] == routes[1]).all()
    assert (routes[0] == routes[2]).all()


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
