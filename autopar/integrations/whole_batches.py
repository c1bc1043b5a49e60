"""Whole batches: a loader of one process's batches -> one that yields the same global batch on every rank.

    DataLoader(dataset, batch_size=8), 4 processes   ->   batches of 32, which every rank reads

A compiled module takes the whole batch on every rank and keeps its part, so that the global batch does not depend on
the plan, and a last batch may be short. It is that of one process with a batch size of 32. The price is that every rank
reads all samples. A shuffle draws from the seed of rank 0.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from autopar.errors import ConfigurationError
from autopar.runtime.consensus import from_first_rank

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)
"""What a loader keeps beside its dataset and the order of its samples."""


class JoinedBatches(Sampler[list[int]]):
    """A batch sampler that yields `count` batches of another one as one batch; the last may hold fewer."""

    def __init__(self, batch_sampler: Any, count: int) -> None:
        self.batch_sampler, self.count = batch_sampler, count

    @property
    def batch_size(self) -> int:
        """Samples of a whole batch."""
        return int(self.batch_sampler.batch_size) * self.count

    @property
    def drop_last(self) -> bool:
        """Whether a short last batch is left out, as the joined sampler does."""
        return bool(getattr(self.batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> Any:
        """The sampler of single samples."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        batches = (batch for batch in self.batch_sampler)  # islice calls iter(), which starts some samplers anew
        while group := list(itertools.islice(batches, self.count)):
            if len(group) == self.count or not self.drop_last:
                yield list(itertools.chain.from_iterable(group))

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        return batches // self.count if self.drop_last else -(-batches // self.count)


def whole_loader(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """`loader` with batches of `count` of its batches, the same on every rank.

    Raises ConfigurationError for an iterable dataset that makes its batches itself, where count is not 1."""
    _share_shuffle(loader)
    if count == 1:
        return loader
    kept = {name: getattr(loader, name) for name in _KEPT}
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise ConfigurationError(
                "an iterable dataset with batch_size=None makes its batches itself, and they cannot be joined over "
                f"{count} processes: give the loader a batch_size, or split batches instead (split_batches=True)"
            )
        return DataLoader(loader.dataset, loader.batch_size * count, drop_last=loader.drop_last, **kept)
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=JoinedBatches(loader.sampler, count), **kept)
    return DataLoader(loader.dataset, batch_sampler=JoinedBatches(loader.batch_sampler, count), **kept)


def _share_shuffle(loader: DataLoader[Any]) -> None:
    """Where a sampler draws from torch's default generator: a generator with a seed that all ranks have."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if getattr(sampler, "generator", 0) is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(from_first_rank(lambda: seed, "the seed of a shuffle"))


def example_of(loader: Any) -> Any:
    """A batch such as the loader yields, without a trace in the random state of the process; None where it is empty."""
    with _random_state_kept(loader):
        return next(iter(loader), None)


@contextlib.contextmanager
def _random_state_kept(loader: Any) -> Iterator[None]:
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    generators = [g for g in (getattr(sampler, "generator", None), getattr(loader, "generator", None)) if g is not None]
    states = [generator.get_state() for generator in generators]
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(before)
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def is_keywords(batch: Any) -> bool:
    """Whether a batch is a mapping, which a loop passes as `model(**batch)`."""
    return isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch)
