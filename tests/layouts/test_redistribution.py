"""Redistribution: which dims of a tensor a layout cuts unevenly, and that the layout is one of the mesh."""

from __future__ import annotations

import pytest

from autopar.layouts.placement import Mesh, Replicate, Shard
from autopar.layouts.redistribution import uneven_dims

MESH = Mesh(("outer", "inner"), (2, 3))


def test_dims_that_all_axes_on_them_do_not_divide_are_uneven() -> None:
    assert uneven_dims((6, 4), (Shard(0), Shard(0)), MESH) == frozenset()
    assert uneven_dims((4, 4), (Shard(0), Shard(0)), MESH) == {0}
    assert uneven_dims((4, 4), (Shard(0), Shard(1)), MESH) == {1}
    assert uneven_dims((5, 5), (Replicate(), Replicate()), MESH) == frozenset()


def test_a_layout_of_a_mesh_with_other_axes_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        uneven_dims((6, 4), (Shard(0),), MESH)
