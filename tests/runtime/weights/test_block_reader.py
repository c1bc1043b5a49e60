"""Blocks read from a file equal those cut from the whole tensor, and no other bytes are read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import safetensors.torch
import torch

from autopar.errors import ConfigurationError
from autopar.layouts.index_blocks import block_of
from autopar.layouts.placement import Layout, Mesh, Replicate, Shard
from autopar.runtime.parameters import local_block
from autopar.runtime.weights.block_reader import BlockReader
from autopar.runtime.weights.safetensors_file import SavedTensor, read_header

R = Replicate()
PLANE, SPACE = Mesh(("a", "b"), (2, 3)), Mesh(("a",), (4,))
CASES: dict[str, tuple[tuple[int, ...], Mesh, Layout]] = {
    "whole": ((6, 700), PLANE, (R, R)),
    "rows": ((12, 700), PLANE, (Shard(0), R)),
    "uneven rows": ((11, 700), PLANE, (Shard(0), Shard(0))),
    "columns": ((6, 1200), PLANE, (R, Shard(1))),
    "uneven columns": ((6, 1201), SPACE, (Shard(1),)),
    "rows and columns": ((6, 1200), PLANE, (Shard(0), Shard(1))),
    "strided rows": ((24, 300), PLANE, (R, Shard(0, split=2))),
    "strided columns": ((3, 2400), PLANE, (Shard(1, split=3), R)),
    "strided twice": ((3, 7200), PLANE, (Shard(1, split=3), Shard(1, split=6))),
    "the middle": ((4, 6, 300), PLANE, (R, Shard(1))),
    "all three": ((4, 6, 1600), PLANE, (Shard(2), Shard(1))),
    "a number": ((), PLANE, (R, R)),
    "empty": ((0, 4), PLANE, (R, R)),
}


def saved(tmp_path: Path, tensor: torch.Tensor) -> SavedTensor:
    safetensors.torch.save_file({"before": torch.ones(3), "w": tensor}, tmp_path / "w.safetensors")
    return read_header(tmp_path / "w.safetensors")["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_reads_its_block_and_nothing_else(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    shape, mesh, layout = CASES[name]
    whole = (torch.arange(math.prod(shape)) % 251 % (2 if dtype == torch.bool else 251)).to(dtype).view(shape)
    where = saved(tmp_path, whole)
    for place in range(mesh.size):
        with BlockReader() as reader:
            block = reader.read(where, block_of(shape, layout, mesh, place))
        expected = local_block(whole, layout, mesh, place)
        assert torch.equal(block, expected)
        if dtype == torch.float32:  # narrower ones have gaps below a sector
            assert reader.bytes_read == expected.numel() * 4


def test_the_block_of_another_rank_is_another(tmp_path: Path) -> None:
    """The mutation that the test above must catch."""
    shape, mesh, layout = CASES["strided twice"]
    whole = torch.arange(float(math.prod(shape))).view(shape)
    with BlockReader() as reader:
        block = reader.read(saved(tmp_path, whole), block_of(shape, layout, mesh, 1))
    assert not torch.equal(block, local_block(whole, layout, mesh, 0))


def test_narrow_columns_are_read_together(tmp_path: Path) -> None:
    """Four bytes of every 64: one call for the tensor, and not one for every row."""
    whole = torch.arange(1600.0).view(100, 16)
    with BlockReader() as reader:
        block = reader.read(saved(tmp_path, whole), [[(0, 100)], [(5, 1)]])
    assert torch.equal(block, whole[:, 5:6])
    assert reader.bytes_read == 99 * 64 + 4


def test_a_file_that_shrank_is_named(tmp_path: Path) -> None:
    where = saved(tmp_path, torch.ones(100))
    where.file.write_bytes(where.file.read_bytes()[:-8])
    with (
        pytest.raises(ConfigurationError, match=r"w.safetensors, tensor 'w': it ends at byte"),
        BlockReader() as reader,
    ):
        reader.read(where, [[(0, 100)]])


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    where = saved(tmp_path, torch.ones(100))
    where.file.unlink()
    with pytest.raises(ConfigurationError, match=r"tensor 'w': No such file"), BlockReader() as reader:
        reader.read(where, [[(0, 100)]])
