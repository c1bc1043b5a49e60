"""Consensus: what all ranks must agree on before the first collective of a plan.

Rank 0 plans and broadcasts; every rank captured its own graph and compares the fingerprint. An error on one rank is
raised on all of them, so nobody waits for a rank that gave up; one that ends without a word is a RankLostError. A
world of one agrees with itself.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, RankLostError, RankMismatchError
from autopar.plans.parallel_plan import Plan
from autopar.runtime.collectives.progress import HERE, is_of_transport
from autopar.runtime.process_groups import rank, world_size

Result = TypeVar("Result")


@contextmanager
def exchanging(what: str) -> Iterator[None]:
    """An exchange of `what` between all ranks: raises RankLostError for what a transport raises that has lost one."""
    HERE.collective = f"the exchange of {what}"
    try:
        yield
    except RuntimeError as error:
        if not is_of_transport(error):
            raise
        HERE.ask()
        HERE.raise_verdict(error)
        raise RankLostError(
            f"another rank ended or does not answer: the exchange of {what} does not end on rank {rank()}; what "
            f"stopped it stands in its own output ({str(error).splitlines()[0]})"
        ) from error


def gather_from_all(value: Result, what: str = "what every rank holds") -> list[Result]:
    """The value of every rank, in rank order, on every rank. what: is exchanged, for messages."""
    if world_size() == 1:
        return [value]
    gathered: list[Result | None] = [None] * world_size()
    with exchanging(what):
        dist.all_gather_object(gathered, value)
    return [item for item in gathered if item is not None]


def from_every_rank(mine: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of all ranks, by name, on every rank: each from the first rank that has it, where not all have it."""
    holders: dict[str, list[int]] = {}
    forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for holder, found in enumerate(gather_from_all({n: (tuple(t.shape), t.dtype) for n, t in mine.items()})):
        for name, form in found.items():
            holders.setdefault(name, []).append(holder)
            forms[name] = form
    whole: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in forms.items():
        whole[name] = mine[name].contiguous() if name in mine else torch.empty(shape, dtype=dtype, device=device)
        if len(holders[name]) < world_size():
            with exchanging(name):
                dist.broadcast(whole[name], holders[name][0])
    return whole


def attempt_on_all(action: Callable[[], Result], what: str = "how a step went") -> Result:
    """Run `action`, called `what` in messages, which starts no collectives, on every rank. Where it raises on some,
    whatever it is, every rank raises: these their own error, the others a RankMismatchError that names the first of
    them."""
    error: Exception | None = None
    result: list[Result] = []
    try:
        result.append(action())
    except Exception as raised:
        error = raised
    mine = "" if error is None else f"{type(error).__name__}: {error}"
    for failed, message in enumerate(gather_from_all(mine, what)):
        if message and error is None:
            raise RankMismatchError(f"rank {failed} failed where rank {rank()} did not: {message}")
    if error is not None:
        raise error
    return result[0]


def from_first_rank(action: Callable[[], Result], what: str = "what rank 0 finds") -> Result:
    """Run `action`, which makes `what`, on rank 0 only; every rank gets its result, or raises its AutoparError.

    An error of another kind, a fault of ours, is raised on rank 0 and named by the others.
    """
    if world_size() == 1:
        return action()
    outcome: list[Result | AutoparError | None] = [None]
    if rank() == 0:
        fault: Exception | None = None
        try:
            outcome[0] = action()
        except AutoparError as error:
            outcome[0] = error
        except Exception as error:
            fault, outcome[0] = error, RankMismatchError(f"rank 0 failed: {type(error).__name__}: {error}")
        with exchanging(what):
            dist.broadcast_object_list(outcome, src=0)
        if fault is not None:
            raise fault
    else:
        with deaf_to_one_interrupt(), exchanging(what):
            dist.broadcast_object_list(outcome, src=0)
    result = outcome[0]
    if isinstance(result, AutoparError):
        raise result
    assert result is not None
    return result


@contextmanager
def deaf_to_one_interrupt() -> Iterator[None]:
    """Let the first SIGINT pass: a terminal sends Ctrl-C to all ranks, and it asks the one that plans to end.
    A second one raises KeyboardInterrupt. Handlers that are not Python's own stay, as do those of other threads."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is not signal.default_int_handler:
        yield
        return

    def on_first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, on_first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def agree_on_fingerprint(fingerprint: str) -> None:
    """Raises RankMismatchError naming the ranks whose graph differs from that of most ranks."""
    fingerprints = gather_from_all(fingerprint, "fingerprints of graphs")
    if strange := _strange_ranks(fingerprints):
        raise RankMismatchError(
            f"ranks {strange} captured another graph than the others ({len(fingerprints)} ranks, "
            f"{len(set(fingerprints))} different graphs): build the same model with the same configuration and pass "
            "inputs of the same global shapes on every rank"
        )


def agree_on_plan(given: Plan | None) -> None:
    """Raises RankMismatchError naming the ranks that were given another plan (or none) than most ranks."""
    digests = gather_from_all("" if given is None else hashlib.sha256(given.to_json()).hexdigest(), "given plans")
    if strange := _strange_ranks(digests):
        raise RankMismatchError(
            f"ranks {strange} were given another plan than the others, or none: pass the same plan file on every rank"
        )


def agree_on_path(path: str | Path) -> None:
    """Raises RankMismatchError naming the ranks that were given another path than most ranks."""
    paths = gather_from_all(str(path), "given paths")
    if strange := _strange_ranks(paths):
        usual, other = str(Counter(paths).most_common(1)[0][0]), paths[int(strange.split(",")[0])]
        raise RankMismatchError(
            f"ranks {strange} were given another path than the others, {other} instead of {usual}: pass one path, "
            "of a folder that all ranks see"
        )


def _strange_ranks(values: Sequence[str]) -> str:
    """The ranks whose value is not the most frequent one, "" where all agree."""
    (usual, _), *_ = Counter(values).most_common()
    return ", ".join(str(index) for index, value in enumerate(values) if value != usual)


def shared_seed() -> int:
    """The seed of rank 0's default generator, on every rank."""
    return from_first_rank(torch.initial_seed, "the seed")
