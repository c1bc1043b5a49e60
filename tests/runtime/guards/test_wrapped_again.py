"""Who wraps a compiled module once more is told why not, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import fully_shard

import autopar

X = torch.ones(2, 4)
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "DistributedDataParallel": lambda module: module._ddp_params_and_buffers_to_ignore,
    "fully_shard": fully_shard,
    "replicate": replicate,
    "FullyShardedDataParallel": lambda module: setattr(module, "_is_fsdp_managed_module", True),
}
"""The first and last by what they do first on a job of several processes, and with a GPU."""


@pytest.fixture(scope="module")
def module() -> autopar.ParallelModule:
    return autopar.compile(nn.Linear(4, 4), X, loss_fn=lambda output, batch: output.square().mean())


@pytest.mark.parametrize("who", WRAPPERS)
def test_wrappers_are_refused_by_name(module: autopar.ParallelModule, who: str) -> None:
    with pytest.raises(autopar.ConfigurationError, match=f"is not wrapped by .*{who}.* train it as it is"):
        WRAPPERS[who](module)
    module(X).backward()


def test_compilers_are_told_that_it_is(module: autopar.ParallelModule, caplog: pytest.LogCaptureFixture) -> None:
    torch.compile(module)
    module.compile()
    assert caplog.text.count("torch.compile of a compiled module changes nothing") == 2
