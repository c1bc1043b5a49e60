"""Rows of Lightning Fabric: one loop with its options."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from autopar.integrations.fabric import AutoparFabricStrategy
from benchmarks.frameworks.framework_models import Points, Texts, gpt2, scorer
from benchmarks.frameworks.framework_row import Run, Stand, row

STEPS = 50


def fabric_of(stand: Stand, *, autopar: Any = None, **settings: Any) -> Any:
    """Fabric's, with autopar's strategy or its own."""
    strategy = AutoparFabricStrategy(autopar=autopar or {}) if stand.ours else "auto"
    fabric = Fabric(accelerator="cpu", devices=stand.processes, strategy=strategy, **settings)
    fabric.launch()
    return fabric


def prepared(fabric: Any, stand: Stand) -> Any:
    """Model, optimizer and loader, set up."""
    net = gpt2()
    optim = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    net, optim = fabric.setup(net, optim)
    return net, optim, fabric.setup_dataloaders(DataLoader(Texts(8 * STEPS), batch_size=stand.batch))


def trained(
    stand: Stand, *, clip: dict[str, float] | None = None, every: int = 1, evaluate: bool = False, **settings: Any
) -> Run:
    """The usual loop. every: batches per step."""
    fabric = fabric_of(stand, **settings)
    net, optim, batches = prepared(fabric, stand)
    losses, metrics = [], {}
    for index, batch in enumerate(batches):
        last = index % every == every - 1
        with fabric.no_backward_sync(net, enabled=not last):
            loss = net(**batch).loss
            fabric.backward(loss)
        losses.append(loss.item())
        if last:
            if clip is not None:
                fabric.clip_gradients(net, optim, **clip)
            optim.step()
            optim.zero_grad()
    if evaluate:
        net.eval()
        with torch.no_grad():
            metrics["loss"] = float(fabric.all_reduce(net(**next(iter(batches))).loss))
    return Run(losses=losses, weights=state_of(fabric, net), metrics=metrics)


def state_of(fabric: Any, net: Any) -> dict[str, Any]:
    """The whole weights, as the strategy would save them."""
    return dict(fabric.strategy.get_module_state_dict(net._forward_module))


def resumed(stand: Stand, **settings: Any) -> Run:
    """Half of the steps, `save`, new objects, `load`, the same batches again."""
    fabric = fabric_of(stand, **settings)
    net, optim, batches = prepared(fabric, stand)
    losses = _steps(fabric, net, optim, batches)
    path = str(stand.folder / "run.ckpt")
    fabric.save(path, {"model": net, "optimizer": optim, "step": 7})
    net, optim, batches = prepared(fabric, stand)
    state = {"model": net, "optimizer": optim, "step": 0}
    fabric.load(path, state, weights_only=False)
    losses += _steps(fabric, net, optim, batches)
    return Run(losses=losses, weights=state_of(fabric, net), metrics={"step": float(state["step"])})


def _steps(fabric: Any, net: Any, optim: Any, batches: Any) -> list[float]:
    losses: list[float] = []
    for batch in batches:
        loss = net(**batch).loss
        fabric.backward(loss)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
        if len(losses) == STEPS // 2:
            break
    return losses


def read_again(stand: Stand) -> Run:
    """The weights of a file of `save`, read by torch alone."""
    fabric = fabric_of(stand)
    net, optim, batches = prepared(fabric, stand)
    losses = _steps(fabric, net, optim, batches)
    fabric.save(str(stand.folder / "run.ckpt"), {"model": net, "optimizer": optim})
    return Run(losses=losses, weights=torch.load(stand.folder / "run.ckpt", weights_only=False)["model"])


def loss_outside(stand: Stand) -> Run:
    """The model returns scores, the loop computes the loss."""
    fabric, net = fabric_of(stand), scorer()
    net, optim = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = []
    for x, y in fabric.setup_dataloaders(DataLoader(Points(8 * STEPS), batch_size=stand.batch)):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        fabric.backward(loss)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return Run(losses=losses, weights=state_of(fabric, net))


def two_optimizers(stand: Stand) -> Run:
    """One per half of the parameters."""
    net = gpt2()
    weights = list(net.parameters())
    fabric_of(stand).setup(net, torch.optim.SGD(weights[:3], lr=0.1), torch.optim.SGD(weights[3:], lr=0.1))
    return Run()


ROWS = (
    row("fabric", "setup and backward", trained),
    row("fabric", "a loss outside of the model, AdamW", loss_outside, precision="fp64"),
    row("fabric", "clip_gradients by norm", partial(trained, clip={"max_norm": 0.2})),
    row("fabric", "clip_gradients by value", partial(trained, clip={"clip_val": 0.01})),
    row("fabric", "no_backward_sync", partial(trained, every=2)),
    row("fabric", "evaluation and all_reduce", partial(trained, evaluate=True)),
    row("fabric", "bf16-mixed", partial(trained, precision="bf16-mixed"), precision="bf16"),
    row("fabric", "save and load", resumed),
    row("fabric", "weights of a file", read_again),
    row("fabric", "tensor parallelism", partial(trained, clip={"max_norm": 0.2}, autopar={"dims": {"tp": 2}}),
        change='AutoparFabricStrategy(autopar={"dims": {"tp": 2}})'),
    row("fabric", "16-true", partial(trained, precision="16-true"), refused="fp32, fp64 or bf16"),
    row("fabric", "two optimizers", two_optimizers, refused="2 optimizers"),
)  # fmt: skip
