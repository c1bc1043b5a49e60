"""Jobs of the workers of which one passes or does something else than the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.runtime.guards.meetings import meet
from autopar.runtime.parameters import full_tensor
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.distributed.models import captured_tied, tied_model, tokens

STRANGE = 1
"""The rank that does something else."""


def _is_strange() -> bool:
    return dist.get_rank() == STRANGE


def _said(action: Callable[[], Any]) -> str:
    """The error of an action, "" where it has none."""
    try:
        action()
    except autopar.RankMismatchError as error:
        return str(error)
    return ""


@prepared_by(captured_tied)
def one_rank_differs(dims: dict[str, int]) -> dict[str, str]:
    """Fault -> what this rank says when one rank makes it; "right" is none. The module is used again behind each."""
    module = compile_once("tied model", tied_model(), tokens(0), dims=dims, optimizer=torch.optim.SGD)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    said: dict[str, str] = {}

    def step(**batch: Any) -> None:
        module(**batch)["loss"].backward()

    said["right"] = _said(lambda: step(**tokens(0)))
    said["batch"] = _said(lambda: step(**tokens(1 if _is_strange() else 0)))
    labels = tokens(0)["labels"] + (1 if _is_strange() else 0)
    said["labels"] = _said(lambda: step(tokens=tokens(0)["tokens"], labels=labels))
    said["shape"] = _said(lambda: step(**tokens(0, batch=3 if _is_strange() else 8)))
    narrow = torch.int32 if _is_strange() else torch.int64
    said["dtype"] = _said(lambda: step(**{name: value.to(narrow) for name, value in tokens(0).items()}))
    said["structure"] = _said(lambda: module(tokens(0)["tokens"]) if _is_strange() else step(**tokens(0)))
    module.train(not _is_strange())
    said["eval"] = _said(lambda: step(**tokens(0)))
    module.train()
    module.norm.train(not _is_strange())
    said["mode of a part"] = _said(lambda: step(**tokens(0)))
    module.norm.train()
    eps = module.norm.eps
    module.norm.eps = 0.5 if _is_strange() else eps
    said["Python state"] = _said(lambda: step(**tokens(0)))
    module.norm.eps = eps
    with torch.set_grad_enabled(not _is_strange()):
        said["no_grad"] = _said(lambda: module(**tokens(0)))
    loss = module(**tokens(0))["loss"]
    said["no backward"] = _said(lambda: module(**tokens(0)) if _is_strange() else loss.backward())
    loss = module(**tokens(0))["loss"]

    def held() -> None:
        with module.no_sync():
            loss.backward()

    said["no_sync"] = _said(held if _is_strange() else loss.backward)
    if not _is_strange():
        optimizer.step()
    said["no optimizer step"] = _said(lambda: step(**tokens(0)))
    return said


@prepared_by(captured_tied)
def other_batches(check_calls: int, dims: dict[str, int], calls: int) -> list[tuple[str, float]]:
    """(error, loss) of calls in which one rank passes another batch, the last ones of `calls` right ones."""
    module = compile_once("tied model", tied_model(), tokens(0), dims=dims, check_calls=check_calls)
    found = []
    for number in range(calls):
        batch = tokens(7 if _is_strange() and number >= 4 else 0)
        losses: list[float] = []
        said = _said(lambda batch=batch, losses=losses: losses.append(float(module(**batch)["loss"].detach())))
        found.append((said, *losses, 0.0)[:2])
    return found


@prepared_by(captured_tied)
def sampled(by: str, check_calls: int = 50) -> tuple[str, float, float, list[str]]:
    """With batch="local" under two shards of two ranks: error, loss, the plain loss of the whole batch, and warnings.

    by: "shard", what is right; "rank" of the job; "same": all pass the first part."""
    module = compile_once(
        "tied model", tied_model(), tokens(0), dims={"dp_shard": 2, "tp": 2}, batch="local", check_calls=check_calls
    )
    index, count = {
        "shard": module.data_shard(),
        "rank": (dist.get_rank(), dist.get_world_size()),
        "same": (0, module.data_shard()[1]),
    }[by]
    whole = tokens(0, batch=16 if by == "rank" else 8)
    part = {name: tensor.chunk(count)[index] for name, tensor in whole.items()}
    warnings = _Warnings()
    logging.getLogger("autopar.runtime.guards.call_guard").addHandler(warnings)
    losses = [float("nan")]
    said = _said(lambda: losses.append(float(module(**part)["loss"].detach())))
    _said(lambda: module(**part))
    return said, losses[-1], float(tied_model()(**whole)["loss"].detach()), warnings.texts


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def met() -> list[list[list[int]]]:
    """What all ranks said in each of two meetings."""
    return [meet((dist.get_rank(), number, -(1 << 63)), "a test") for number in range(2)]


def _captured_in_parts(**_: Any) -> bool:
    return capture_once("tied model", tied_model(), tokens(0), parts=2)


@prepared_by(_captured_in_parts)
def weights_apart(check_calls: int, parts: int) -> tuple[str, float]:
    """One rank leaves out an optimizer step, or, where the call ran backward already (two parts), the backward pass:
    the error of the next thing that it does, and how far its weights are from rank 0's."""
    module = compile_once(
        "tied model",
        tied_model(),
        tokens(0),
        dims={"dp_replicate": 2},
        micro_batches=parts,
        check_calls=check_calls,
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss = module(**tokens(0))["loss"]
    if parts == 1:
        loss.backward()
        if not _is_strange():
            optimizer.step()
        said = _said(lambda: module(**tokens(0)))
    else:
        said = _said(lambda: module(**tokens(0)) if _is_strange() and check_calls else _backward(loss))
        optimizer.step()
    mine = full_tensor(module.head.weight.detach()).clone()
    first = mine.clone()
    dist.broadcast(first, 0)
    return said, float((mine - first).abs().max())


def _backward(loss: torch.Tensor) -> None:
    if not _is_strange():
        loss.backward()
