"""Call guard: before a step runs, ranks compare what they are about to do and what they were given for it.

    rank 0: module(x)     rank 1: module(x)       one small meeting, then the step
    rank 0: module(x)     rank 1: module(y)       RankMismatchError on both: rank 1 passed other values of x
    rank 0: backward()    rank 1: module(x)       RankMismatchError on both: rank 1 started call 8, rank 0 the backward

At every call and every backward pass a rank says seven numbers (`meetings.py`): what it starts, the form of what it was
given, its optimizer steps, and digests of the values, these at the first calls and at every n-th. Only where they do
not agree, all of it is told in words (`call_differences.py`). The meeting stands in front of every collective of a
step, so a rank that does something else is met, and not waited for.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar._compat import TreeSpec, tree_flatten_with_path
from autopar.capture.inputs import leaf_name
from autopar.errors import RankMismatchError
from autopar.runtime.consensus import from_first_rank, gather_from_all
from autopar.runtime.guards.call_differences import Form, ToldOfCall, differences
from autopar.runtime.guards.digests import digest_of_text, digests_of, has_digest
from autopar.runtime.guards.meetings import meet
from autopar.runtime.guards.update_count import NOTHING_TO_UPDATE, UpdateCount
from autopar.runtime.process_groups import rank, world_size

log = logging.getLogger(__name__)

CHECK_CALLS = 50
"""Every so-many-th call is compared by value where nobody says otherwise."""
FIRST_CALLS = 3
"""So many calls are compared by value whatever that is: a wrong sampler or seed shows at once."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
"""Types of arguments whose text is the same in all processes."""
MODULE_NUMBER = ("has", "number of this module, in the order in which modules were compiled")
_NUMBERS = itertools.count(1)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCall:
    """A call of the module on this rank. act: its name; leaves, spec: of the arguments; split: leaf -> batch dim of
    those of which the rank passes its part, by `shard` = `data_shard()`; state: what else must be equal, by (verb,
    name); key: equal where the form of two calls is."""

    act: str
    leaves: Sequence[Any]
    spec: TreeSpec
    split: Mapping[int, int]
    shard: tuple[int, int]
    state: Callable[[], Form]
    key: Hashable

    @property
    def sizes(self) -> list[int]:
        """Of the split dims, on this rank."""
        return [self.leaves[leaf].shape[dim] for leaf, dim in self.split.items()]

    def names(self) -> list[str]:
        """Of the leaves, as users write them."""
        return [leaf_name(path) for path, _ in tree_flatten_with_path(self.spec.unflatten(self.leaves))[0]]

    def form(self) -> dict[tuple[str, str], str]:
        """Structure, shapes, dtypes and constants of the arguments, and the state; sizes of split dims left out."""
        form: dict[tuple[str, str], str] = {}
        for index, (name, leaf) in enumerate(zip(self.names(), self.leaves, strict=True)):
            if isinstance(leaf, torch.Tensor):
                form["passed", name] = _shape(leaf, self.split.get(index))
                form["passed", f"dtype of {name}"] = str(leaf.dtype)
            else:
                form["passed", name] = repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__qualname__
        structure = _ADDRESS.sub("", str(self.spec))
        return {**form, ("passed", "the structure of its arguments"): structure, **self.state()}

    def digests(self) -> dict[int, int]:
        """Leaf -> digest of its values."""
        found = {i: e for i, e in enumerate(self.leaves) if isinstance(e, torch.Tensor) and has_digest(e)}
        return dict(zip(found, digests_of(list(found.values())), strict=True)) if found else {}


def _shape(tensor: torch.Tensor, split: int | None) -> str:
    sizes = ["any" if dim == split else str(size) for dim, size in enumerate(tensor.shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


class CallGuard:
    """The comparisons of one module. every: values are compared at the first calls and at every so-many-th; 0: nothing
    is compared at all. parameters: those whose updates count. `number`: of the module among those that were compiled in
    this job, as rank 0 counts them: modules of one class differ in it."""

    def __init__(self, every: int, parameters: Iterable[nn.Parameter]) -> None:
        self.is_on = every > 0 and world_size() > 1
        self._every = every
        self._calls = 0
        self._forms: dict[Hashable, int] = {}
        self._updates = UpdateCount(parameters if self.is_on else ())
        self._has_warned = False
        self.number = 0
        if self.is_on:
            self.number = from_first_rank(lambda: next(_NUMBERS), "the number of a compiled module")
            meet((0,), "the end of compile")  # makes the group, where all ranks are at one place

    def before_call(self, call: ComparedCall) -> tuple[int, ...]:
        """A number per rank that stands for its `ComparedCall.sizes`; none where nothing is compared.

        Raises RankMismatchError, on every rank, where ranks do different things or were given different ones, and
        RankLostError where one does not come."""
        if not self.is_on:
            return ()
        looks = self._calls < FIRST_CALLS or self._calls % self._every == 0
        self._calls += 1
        updates, digests = self._updates.read(), call.digests() if looks else {}
        whole = [value for leaf, value in digests.items() if leaf not in call.split]
        part = [value for leaf, value in digests.items() if leaf in call.split]
        own = (_one(call.sizes), digest_of_text(call.act), self._form(call), updates)
        rows = meet((*own, call.shard[0], _one(whole), _one(part)), call.act)
        if not _agree(rows):
            self._tell(call, updates, digests)
        if part and call.shard[1] > 1:
            self._warn_about_equal_parts(call, rows)
        return tuple(sizes for sizes, *_ in rows)

    def before(self, act: str) -> None:
        """As `before_call`, of a backward pass or another act that all ranks do."""
        if self.is_on and not _agree(meet((0, digest_of_text(act), self.number, NOTHING_TO_UPDATE, 0, 0, 0), act)):
            form = {MODULE_NUMBER: str(self.number)}
            told = ToldOfCall(act=act, updates=NOTHING_TO_UPDATE, shard=(0, 1), form=form, whole={}, part={})
            raise RankMismatchError(differences(gather_from_all(told)))

    def _form(self, call: ComparedCall) -> int:
        if call.key not in self._forms:
            self._forms[call.key] = digest_of_text(repr((self.number, list(call.form().items()))))
        return self._forms[call.key]

    def _tell(self, call: ComparedCall, updates: int, digests: Mapping[int, int]) -> None:
        names = call.names()
        told = ToldOfCall(
            act=call.act,
            updates=updates,
            shard=call.shard,
            form={MODULE_NUMBER: str(self.number), **call.form()},
            whole={names[leaf]: value for leaf, value in digests.items() if leaf not in call.split},
            part={names[leaf]: value for leaf, value in digests.items() if leaf in call.split},
        )
        raise RankMismatchError(differences(gather_from_all(told)))

    def _warn_about_equal_parts(self, call: ComparedCall, rows: Sequence[Sequence[int]]) -> None:
        if self._has_warned or len({part for *_, part in rows}) > 1:
            return
        self._has_warned = True
        if rank() == 0:
            log.warning(
                f'in {call.act} all {call.shard[1]} parts of the batch are equal: with batch="local" a rank passes '
                "part index of count, where index, count = module.data_shard(), and every sample is passed once"
            )


def _agree(rows: Sequence[Sequence[int]]) -> bool:
    _, acts, forms, updates, shards, wholes, digests = zip(*rows, strict=True)
    parts = set(zip(shards, digests, strict=True))
    return (
        len(set(acts)) == len(set(forms)) == len(set(wholes)) == 1
        and len(set(updates) - {NOTHING_TO_UPDATE}) <= 1
        and len(parts) == len(set(shards))
    )


def _one(numbers: Sequence[int]) -> int:
    """One number for several; 0 for none."""
    return digest_of_text(repr(numbers)) if numbers else 0
