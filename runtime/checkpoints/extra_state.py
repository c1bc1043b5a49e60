"""Extra state: what a user keeps beside the model, such as schedulers and the position of a sampler.

    {"scheduler": scheduler, "sampler": {"epoch": 3, "position": 512}}

What has a state (`state_dict`, `load_state_dict`) is saved by it and takes it back; other values are plain data, which
a load returns. All ranks of a job save the same, but for a `PerDataRank`, of which the states of all parts of the batch
are saved as a list.
"""

from __future__ import annotations

import copy
import hashlib
import pprint
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from autopar._compat import tree_map_only
from autopar.errors import ConfigurationError
from autopar.runtime.checkpoints.tensor_files import State
from autopar.runtime.checkpoints.training_state import EXTRA, EXTRA_STATE, MODEL, check_plain
from autopar.runtime.consensus import attempt_on_all, gather_from_all
from autopar.runtime.guards.digests import digests_of
from autopar.runtime.parallel_module import ParallelModule


@runtime_checkable
class Stateful(Protocol):
    """What keeps its state as plain data: schedulers, scalers, samplers."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state."""


@dataclass(frozen=True, slots=True)
class PerDataRank:
    """What has a state of its own for every part of the batch, such as torchdata's StatefulDataLoader; ranks that load
    one part have one state.

    autopar.save("run", module, optimizer, extra={"loader": autopar.PerDataRank(loader)})
    """

    value: Stateful

    def state_dict(self) -> dict[str, Any]:
        """The state on this rank."""
        return self.value.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state of this rank."""
        return self.value.load_state_dict(state_dict)


def with_all_data_ranks(state: State, extra: Mapping[str, Any], module: ParallelModule) -> State:
    """What is written, with the states of all parts of the batch where each has its own; every rank calls it."""
    names = [EXTRA + name for name, value in extra.items() if isinstance(value, PerDataRank)]
    if not names:
        return state
    index, count = module.data_shard()
    ranks = gather_from_all((index, {name: state[name][0] for name in names}))
    first = dict(reversed(ranks))
    return state | {name: [[first[part][name] for part in range(count)]] for name in names}


def extra_state(extra: Mapping[str, Any]) -> State:
    """What is written, by name. Raises ConfigurationError for what is no plain data."""
    state: State = {}
    for name, value in extra.items():
        plain = value.state_dict() if isinstance(value, Stateful) else value
        check_plain(EXTRA + name, plain)
        state[EXTRA + name] = [plain]  # in a list, a tensor is plain data too
    return state


def agree_on_extra(state: State) -> None:
    """Raises ConfigurationError, on every rank, where ranks would save different values: one of them is written."""
    ranks = gather_from_all({name: _digest(value) for name, value in state.items()})
    for name in sorted({name for found in ranks for name in found}):
        strange = [str(rank) for rank, found in enumerate(ranks) if found.get(name) != ranks[0].get(name)]
        if strange:
            raise ConfigurationError(
                f"{name} of ranks {', '.join(strange)} is not that of rank 0, and a checkpoint holds one value: pass "
                "the same on all ranks, such as a list of all their values (torch.distributed.all_gather_object)"
            )


def _digest(value: Any) -> str:
    """The same on two ranks where the plain data is the same: sets and dicts are sorted, tensors are one number."""
    plain = tree_map_only(torch.Tensor, lambda tensor: (tensor.shape, str(tensor.dtype), *digests_of([tensor])), value)
    return hashlib.sha256(pprint.pformat(plain, width=1_000).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenState:
    """A state for an object of the user's: `read` gives what it has, `take` gives it `value`."""

    read: Callable[[], Any]
    take: Callable[[Any], Any]
    value: Any


def states_to_take(values: State, module: ParallelModule, extra: Mapping[str, Any]) -> list[TakenState]:
    """Those of `extra`, and the extra state of the module's parts, as far as `values` has them."""
    found = [
        TakenState(
            read=owner.state_dict, take=owner.load_state_dict, value=_of_this_rank(name, owner, values, module)
        )
        for name, owner in extra.items()
        if EXTRA + name in values
    ]
    for name, value in values.items():
        path, _, last = name.removeprefix(MODEL).rpartition(".")
        if name.startswith(MODEL) and last == EXTRA_STATE:
            part = module.get_submodule(path)
            found.append(TakenState(read=part.get_extra_state, take=part.set_extra_state, value=value[0]))
    return found


def _of_this_rank(name: str, owner: Any, values: State, module: ParallelModule) -> Any:
    """The state for `owner`. Raises ConfigurationError where the batch had another number of parts."""
    value = values[EXTRA + name][0]
    if not isinstance(owner, PerDataRank):
        return value
    index, count = module.data_shard()
    if not isinstance(value, list) or len(value) != count:
        saved = f"{len(value)} parts" if isinstance(value, list) else "no PerDataRank"
        raise ConfigurationError(
            f"extra[{name!r}] is of {saved} in the checkpoint, and the batch has {count} here: a part's state fits no "
            f"other cut; leave it out, what was saved comes back as load(...).extra[{name!r}]"
        )
    return value[index]


def take_states(states: Sequence[TakenState]) -> None:
    """Give every object its state. Where one refuses it on any rank, all have what they had, and every rank raises."""
    before = attempt_on_all(lambda: [copy.deepcopy(state.read()) for state in states])
    try:
        attempt_on_all(lambda: [state.take(state.value) for state in states])
    except Exception:
        for state, old in zip(states, before, strict=True):
            with suppress(Exception):
                state.take(old)
        raise


def check_takers(extra: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for what a load cannot give anything to."""
    for name, value in extra.items():
        if not isinstance(value, Stateful):
            raise ConfigurationError(
                f"extra[{name!r}] is a {type(value).__name__} without load_state_dict: leave it out, plain data comes "
                f"back as load(...).extra[{name!r}]"
            )
