"""Point 11, its other half: training that was saved goes on elsewhere as if it had not stopped."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from benchmarks.faults.checkpoints import adam, saved, trained
from benchmarks.faults.fault import Fault, Scene, fault, make_fault
from benchmarks.faults.victims import Net, batch, compiled, expect_value, expect_weights, train, whole


def _resumed(freeze: bool, scene: Scene) -> None:
    """Training that was saved and loaded goes on as if it had not stopped."""
    plain = Net()
    if freeze:
        plain.blocks[0].requires_grad_(False)
    plain_optimizer = adam(plain.parameters())
    train(plain, plain_optimizer, [batch(seed) for seed in range(5)])
    for first, seeds in ((True, range(2)), (False, range(2, 5))):
        model = Net(seed=0 if first else 8)
        if freeze:
            model.blocks[0].requires_grad_(False)
        module = compiled(scene, model, batch())
        optimizer = adam(module.parameters())
        if not first:
            autopar.load(scene.folder / "step", module, optimizer)
        train(module, optimizer, [batch(seed) for seed in seeds])
        if first:
            autopar.save(scene.folder / "step", module, optimizer)
    expect_weights(module, plain, 1e-4)


RESUMED: tuple[Fault, ...] = tuple(
    make_fault(11, f"resumed{'_with_a_frozen_block' if freeze else ''}",
               "training is saved, loaded into new weights, and goes on", partial(_resumed, freeze), layout=layout,
               right=True)
    for layout in ("alone", "shard2", "tp2", "pp2", "shard2tp2")
    for freeze in (False, True)
)  # fmt: skip


class Idle(Net):
    """A block that some batches do not use: its optimizer state comes late."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.idle = nn.Linear(8, 8)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        used: torch.Tensor = self.idle(hidden) if self.training and getattr(self, "used", False) else hidden
        return used


@fault(11, "the optimizer has no state yet for a block that was never used", on=("alone", "shard2"), right=True)
def state_partly_absent(scene: Scene) -> None:
    plain = Idle()
    plain_optimizer = adam(plain.parameters())
    train(plain, plain_optimizer, [batch(seed) for seed in range(4)])
    for first, seeds in ((True, range(2)), (False, range(2, 4))):
        module = compiled(scene, Idle(seed=0 if first else 8), batch())
        optimizer = adam(module.parameters())
        if first:
            train(module, optimizer, [batch(seed) for seed in seeds])
            autopar.save(scene.folder / "step", module, optimizer)
        else:
            autopar.load(scene.folder / "step", module, optimizer)
            train(module, optimizer, [batch(seed) for seed in seeds])
    expect_weights(module, plain, 1e-4)


@fault(11, "a checkpoint of two processes is loaded by one process afterwards", on=("shard2",), right=True,
       then=lambda scene: _by_one(scene))  # fmt: skip
def other_number_of_processes(scene: Scene) -> None:
    saved(scene)


def _by_one(scene: Scene) -> None:
    """Each of the new processes alone."""
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    module = autopar.compile(Net(seed=7), batch(), mode="fast")
    optimizer = adam(module.parameters())
    autopar.load(scene.folder / "step", module, optimizer)
    plain = Net()
    train(plain, adam(plain.parameters()), [batch(0), batch(1)])
    expect_weights(module, plain, 1e-4)


@fault(11, "a save is loaded while the weights are others: every value comes back", on=("shard4", "tp4"), right=True)
def loaded_back(scene: Scene) -> None:
    module, optimizer = trained(scene, range(3))
    kept = {name: whole(value).clone() for name, value in module.named_parameters()}
    autopar.save(scene.folder / "step", module, optimizer)
    train(module, optimizer, [batch(40)])
    autopar.load(scene.folder / "step", module, optimizer)
    for name, value in module.named_parameters():
        expect_value(name, value, kept[name], 0.0)
