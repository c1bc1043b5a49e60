"""What `mesh=` and `dims=` may say, and errors that say what to write."""

from __future__ import annotations

import pytest

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.request.mesh_axes import FREE_AXIS_NAMES, MOST_AXES, check_axes, pinned_axes, sized_mesh


def test_named_axes_are_ordered_filled_and_dropped_where_they_have_one_device() -> None:
    assert pinned_axes({"tp": 2, "dp_shard": -1, "dp_replicate": 1}, 8) == {"dp_shard": 4, "tp": 2}
    assert pinned_axes({}, 8) == {}


def test_as_many_free_axes_have_names_as_a_mesh_may_have() -> None:
    assert [len(FREE_AXIS_NAMES[number]) for number in range(MOST_AXES + 1)] == list(range(MOST_AXES + 1))


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ({"tp": 3}, "do not divide 8"),
        ({"pp": 2}, "unknown axis 'pp'"),
        ({"tensor": 2}, "unknown axis 'tensor'; axes are dp_replicate, dp_shard, cp, cp_inner, ep, ep_inner, tp, pp$"),
        ({"dp_shrad": 2}, 'did you mean "dp_shard"'),
        ({"tp": 0}, "size 0"),
        ({"tp": -1, "dp_shard": -1}, "one axis at most"),
    ],
)
def test_impossible_dims_say_why(dims: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_axes(Cluster.parse("8 cpu"), None, dims)


def test_a_mesh_of_another_size_or_of_too_many_axes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the cluster 8"):
        check_axes(Cluster.parse("8 cpu"), (3, 2), None)
    with pytest.raises(ConfigurationError, match="at most 4"):
        check_axes(Cluster.parse("32 cpu"), (2, 2, 2, 2, 2), None)
    assert sized_mesh([2, 2, 2], 8) == Mesh(("outer", "middle", "inner"), (2, 2, 2))
