"""The plain loop of a script, as rows run it: a small GPT, any optimizer, in any precision.

    looped(stand, optimizer=torch.optim.RMSprop, dims={"tp": 2})       fp64, so that weights can be compared
    looped(stand, precision="fp16", scaler={"init_scale": 2.0**24})    fp16 products, with a GradScaler; fp32 weights
    looped(stand, dtype=torch.bfloat16, reduce_dtype="fp32")           bf16 weights

Without autopar `precision` is `torch.autocast`, and `reduce_dtype` is nothing: there is one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.demo.gpt import GPT, GPTConfig
from autopar.integrations.states import whole_state
from benchmarks.frameworks.framework_models import VOCABULARY, Texts
from benchmarks.frameworks.framework_row import Run, Stand

STEPS = 50
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
CONFIG = GPTConfig(vocabulary=VOCABULARY, positions=16, width=64, heads=2, layers=1)
"""Wide enough for 8-bit states: torchao keeps blocks of less than 4,096 elements in their dtype."""

Clip = Callable[[nn.Module], object]


def small_gpt(dtype: torch.dtype) -> GPT:
    """The same weights in every process."""
    torch.manual_seed(0)
    return GPT(CONFIG).to(dtype)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Tokens, and themselves as labels; whole on every rank."""
    tokens = Texts(8 * STEPS).tokens
    return [(each, each) for each in torch.split(tokens, 8)]


def looped(
    stand: Stand,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    settings: dict[str, Any] | None = None,
    taken: Callable[[nn.Module], Any] = lambda model: model.parameters(),
    dtype: torch.dtype = torch.float64,
    precision: str | None = None,
    autocast: str | None = None,
    scaler: dict[str, Any] | None = None,
    told: bool = True,
    clip: Clip | None = None,
    resumed: bool = False,
    **options: Any,
) -> Run:
    """autocast: around the call, instead of `precision`; scaler: settings of a GradScaler, of which `compile` is told
    where `told`; resumed: half of the steps, then all from a checkpoint; clip: in place of torch's, with autopar;
    options: of `compile`."""
    model: Any = small_gpt(dtype)
    data = batches()
    scaling = torch.amp.GradScaler("cpu", enabled=scaler is not None, **(scaler or {}))
    if stand.ours:
        options |= {"precision": precision} if precision else {}
        options |= {"scaler": scaling} if scaler is not None and told else {}
        with _narrow(autocast):
            model = autopar.compile(model, data[0], optimizer=optimizer, **options)
    around = autocast or (None if stand.ours else precision)
    clipping = clip if stand.ours or clip is None else clip_by_torch
    loop = _Loop(model, optimizer(taken(model), **(settings or {})), scaling, around, clipping)
    losses = loop.run(data[: STEPS // 2])
    if resumed:
        loop.save_and_spoil(stand)
    losses += loop.run(data[STEPS // 2 :])
    weights = whole_state(model) if stand.ours else dict(model.state_dict())
    return Run(losses=losses, weights=weights, metrics={"scale": scaling.get_scale(), "skipped": float(loop.skipped)})


class _Loop:
    """The loop and what it holds."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, scaler: Any, autocast: str | None, clip: Clip | None
    ) -> None:
        self.model, self.optimizer, self.scaler, self.autocast, self.clip = model, optimizer, scaler, autocast, clip
        self.skipped = 0

    def run(self, data: list[tuple[Tensor, Tensor]]) -> list[float]:
        """The losses."""
        return [self._step(*batch) for batch in data]

    def _step(self, tokens: Tensor, labels: Tensor) -> float:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            with _narrow(self.autocast):
                loss: Tensor = self.model(tokens, labels)
            self.scaler.scale(loss).backward()
            return loss.detach()

        if isinstance(self.optimizer, torch.optim.LBFGS):
            return float(self.optimizer.step(closure))  # type: ignore[no-untyped-call]
        loss = closure()
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            self.clip(self.model)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before
        return float(loss)

    def save_and_spoil(self, stand: Stand) -> None:
        """Save, change all of it, load."""
        if not stand.ours:
            return
        autopar.save(stand.folder / "run", self.model, self.optimizer, extra={"scaler": self.scaler})
        for parameter in self.model.parameters():
            parameter.detach().zero_()
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": 3.0, "_growth_tracker": 0})
        autopar.load(stand.folder / "run", self.model, self.optimizer, extra={"scaler": self.scaler})


@contextlib.contextmanager
def _narrow(precision: str | None) -> Iterator[None]:
    with torch.autocast("cpu", dtype=NARROW[precision]) if precision else contextlib.nullcontext():
        yield


def clip_by_torch(model: nn.Module) -> object:
    """As scripts do."""
    return nn.utils.clip_grad_norm_(model.parameters(), 0.2)


def clip_by_autopar(model: nn.Module) -> object:
    """What pipelines need."""
    return autopar.clip_grad_norm_(model.parameters(), 0.2)
