"""Guards: what a weight, a master or a sum of gradients may not become."""

from autopar.layouts.placement import Partial, Replicate, Shard
from autopar.planner.problem.guards import gathers, reduces

P, R, S = Partial(), Replicate(), Shard(0)
OTHER = Shard(1)


def test_a_shard_on_a_guarded_axis_stays_as_it_is() -> None:
    sources, targets = [(S, R), (R, S)], [(S, R), (R, R), (OTHER, S), None]
    assert gathers(sources, targets, [0]).tolist() == [[False, True, True, True], [False] * 4]
    assert gathers(sources, targets, [1]).tolist() == [[False] * 4, [True, True, False, True]]
    assert not gathers(sources, targets, []).any()


def test_only_partial_placements_are_kept() -> None:
    assert reduces([(P, S)], [(P, R), (R, S), (P, S)]).tolist() == [[False, True, False]]
    assert reduces([(P,)], [(S,), (P,)]).tolist() == [[True, False]]
    assert not reduces([(S,)], [(R,)]).any()
