"""Random bits depend on seed, salt and global index only."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ops.philox import philox
from autopar.ops.random_index import Runs, full_runs, global_index, keep_mask, random_words, reference_seed

SEED = torch.tensor(1234)


class CountedOperators(TorchDispatchMode):
    """The names of operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_global_index_is_row_major() -> None:
    runs = (((1, 2),), ((0, 1), (3, 2)))
    expected = torch.arange(15).reshape(3, 5)[1:3][:, [0, 3, 4]]
    assert torch.equal(global_index((3, 5), runs, torch.device("cpu")), expected)
    assert torch.equal(global_index((3, 5), runs, torch.device("cpu"), 7), 7 * expected)


def test_the_index_of_a_grid_takes_one_operator_for_each_dim_and_one_to_join_them() -> None:
    """Each is a launch on a GPU."""
    for runs, wanted in ((full_runs((6,)), 1), ((((1, 2),), ((2, 3),)), 3)):
        with CountedOperators() as counted:
            global_index((6, 8)[: len(runs)], runs, torch.device("cpu"), 40)
        assert counted.names.count("arange") + counted.names.count("add") == wanted
        assert set(counted.names) <= {"arange", "add", "unsqueeze"}


def test_the_seed_of_plain_operators_is_torchs_own() -> None:
    torch.manual_seed(2**62 - 3)
    assert torch.equal(reference_seed(torch.device("cpu")), torch.tensor(2**62 - 3))
    with CountedOperators() as counted:
        reference_seed(torch.device("meta"))
    assert counted.names == ["full"]  # no copy from the host, which waits for the device


def test_an_element_has_the_word_of_its_number() -> None:
    """Number 4 * counter + lane, under (seed, salt, draw)."""
    words = random_words((5, 6), SEED, 9, full_runs((5, 6)), draw=1)
    table = philox(torch.arange(8), 9, 1, SEED).reshape(-1)
    assert torch.equal(words.reshape(-1), table[:30])


@pytest.mark.parametrize(
    "runs",
    [
        (((0, 6),), ((0, 7),), ((0, 5),)),
        (((2, 3),), ((0, 7),), ((0, 5),)),
        (((2, 3),), ((1, 4),), ((0, 5),)),
        (((2, 1),), ((3, 1),), ((4, 1),)),
        (((0, 2), (4, 1)), ((1, 2), (5, 1)), ((0, 1), (3, 2))),
        (((0, 6),), ((0, 7),), ((2, 3),)),
        (((0, 0),), ((0, 7),), ((0, 5),)),
    ],
)
def test_a_block_has_the_words_of_the_whole(runs: Runs) -> None:
    shape = (6, 7, 5)
    whole = random_words(shape, SEED, 3, full_runs(shape)).reshape(-1)
    expected = whole[global_index(shape, runs, SEED.device)]
    assert torch.equal(random_words(shape, SEED, 3, runs), expected)


def test_local_numbers_in_place_of_global_ones_are_caught() -> None:
    shape, runs = (6, 8), (((3, 3),), ((0, 8),))
    whole = random_words(shape, SEED, 3, full_runs(shape))
    assert torch.equal(random_words(shape, SEED, 3, runs), whole[3:])
    assert not torch.equal(random_words((3, 8), SEED, 3, full_runs((3, 8))), whole[3:])


def test_every_cut_draws_the_same_mask() -> None:
    shape = (6, 8)
    whole = keep_mask(shape, 0.4, SEED, 5, full_runs(shape))
    for rows, columns in itertools.product([(0, 3), (3, 3)], [((0, 2), (4, 2)), ((2, 2), (6, 2))]):
        part = keep_mask(shape, 0.4, SEED, 5, ((rows,), columns))
        kept = [start + offset for start, length in columns for offset in range(length)]
        assert torch.equal(part, whole[rows[0] : rows[0] + rows[1]][:, kept])


def test_keep_rate_is_one_minus_p() -> None:
    shape = (1000, 1000)
    for p in (0.1, 0.5, 0.9):
        kept = keep_mask(shape, p, SEED, 0, full_runs(shape)).double().mean()
        assert abs(float(kept) - (1 - p)) < 3e-3


def test_salts_and_seeds_are_independent() -> None:
    shape = (100_000,)
    masks = [
        keep_mask(shape, 0.5, torch.tensor(seed), salt, full_runs(shape)) for seed, salt in [(1, 0), (1, 1), (2, 0)]
    ]
    for first, second in itertools.combinations(masks, 2):
        assert abs(float((first == second).double().mean()) - 0.5) < 1e-2
