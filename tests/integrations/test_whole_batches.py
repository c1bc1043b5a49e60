"""A loader that yields the batches of all processes as one."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from autopar.errors import ConfigurationError
from autopar.integrations.whole_batches import JoinedBatches, example_of, is_keywords, whole_loader


class _Numbers(IterableDataset[int]):
    def __iter__(self) -> object:  # type: ignore[override]  # the base asks for an Iterator
        return iter(range(7))


def _batches(loader: DataLoader[object]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_batches_of_all_processes_are_those_of_one_with_the_whole_batch_size() -> None:
    for drop_last in (False, True):
        alone = DataLoader(range(22), batch_size=8, drop_last=drop_last)  # type: ignore[arg-type]  # a range is a dataset
        part = DataLoader(range(22), batch_size=4, drop_last=drop_last)  # type: ignore[arg-type]
        whole = whole_loader(part, 2)
        assert _batches(whole) == _batches(alone)
        assert len(whole) == len(alone)


def test_a_short_last_batch_is_left_out_where_the_loader_says_so() -> None:
    part = DataLoader(range(12), batch_size=4, drop_last=True)  # type: ignore[arg-type]
    assert _batches(whole_loader(part, 2)) == [list(range(8))]


def test_a_stream_has_whole_batches() -> None:
    assert _batches(whole_loader(DataLoader(_Numbers(), batch_size=2), 2)) == [[0, 1, 2, 3], [4, 5, 6]]


def test_a_stream_that_makes_its_batches_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="batch_size=None"):
        whole_loader(DataLoader(_Numbers(), batch_size=None), 2)
    loader = DataLoader(_Numbers(), batch_size=None)
    assert whole_loader(loader, 1) is loader


def test_a_batch_sampler_that_stands_as_a_sampler_is_joined_too() -> None:
    batches = torch.utils.data.BatchSampler(range(6), batch_size=2, drop_last=False)
    loader = DataLoader(torch.arange(6), batch_size=None, sampler=batches)  # type: ignore[arg-type]  # a tensor is a dataset
    assert _batches(whole_loader(loader, 2)) == [[0, 1, 2, 3], [4, 5]]


def test_joined_batches_hand_on_the_sampler_that_frameworks_replace() -> None:
    joined = JoinedBatches(torch.utils.data.BatchSampler(range(6), batch_size=2, drop_last=False), 2)
    joined.sampler = [5, 4, 3, 2, 1, 0]
    assert list(joined) == [[5, 4, 3, 2], [1, 0]]
    assert joined.batch_size == 4


class _Restarting:
    """A batch sampler that is its own iterator, as Lightning's, and begins anew when it is asked for one."""

    def __iter__(self) -> _Restarting:
        self.left = [[0, 1], [2, 3], [4]]
        return self

    def __next__(self) -> list[int]:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


def test_a_sampler_that_begins_anew_is_read_once() -> None:
    batches = iter(JoinedBatches(_Restarting(), 2))
    assert [next(batches, None) for _ in range(3)] == [[0, 1, 2, 3], [4], None]


def test_a_shuffle_does_not_follow_what_else_draws() -> None:
    torch.manual_seed(3)
    loader = whole_loader(DataLoader(range(8), batch_size=2, shuffle=True), 2)  # type: ignore[arg-type]
    torch.manual_seed(3)
    other = whole_loader(DataLoader(range(8), batch_size=2, shuffle=True), 2)  # type: ignore[arg-type]
    torch.rand(5)
    assert _batches(loader) == _batches(other)


def test_an_example_leaves_no_trace_in_random_states() -> None:
    torch.manual_seed(0)
    loader = whole_loader(DataLoader(range(8), batch_size=2, shuffle=True), 2)  # type: ignore[arg-type]
    before = torch.get_rng_state()
    example = example_of(loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert example.tolist() == _batches(loader)[0]
    assert example_of(DataLoader([], batch_size=2)) is None  # type: ignore[arg-type]


def test_only_mappings_by_name_are_keywords() -> None:
    assert is_keywords({"x": 1})
    assert not is_keywords({1: 2})
    assert not is_keywords((1, 2))
