"""Points 3 and 4: ranks that pass other batches than they should, or make other calls."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

import autopar
from benchmarks.faults.fault import Scene, fault
from benchmarks.faults.victims import Batch, Net, backward, batch, compiled, expect_step, loss_of, sgd, train

ONE = ("rank[s]? .*1",)
WHOLE = (*ONE, "data_shard")


def _mine(inputs: Batch, index: int, count: int) -> Batch:
    return {name: value.chunk(count)[index].contiguous() for name, value in inputs.items()}


def _steps(module: nn.Module, inputs: Batch, steps: int = 12) -> None:
    """Enough calls that what is compared from time to time is compared once."""
    train(module, sgd(module.parameters()), [inputs] * steps)


@fault(3, 'rank 1 passes other samples where every rank passes the whole batch', on=("dp2", "tp4", "shard2tp2"),
       words=WHOLE)  # fmt: skip
def other_samples(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    _steps(module, batch(seed=int(scene.rank == 1)))


@fault(3, "rank 1 passes other samples from the second call on", on=("dp2", "pp2"), words=WHOLE)
def other_samples_later(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    backward(loss_of(module(**batch())))
    _steps(module, batch(seed=int(scene.rank == 1)))


@fault(3, "every rank draws its batch from a seed of its own, as DistributedSampler does", on=("dp4",),
       words=("rank", "data_shard"))  # fmt: skip
def sampler_of_each(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    _steps(module, batch(seed=scene.rank))


@fault(3, "rank 1 passes the same samples in another order", on=("dp2",), words=WHOLE)
def other_order(scene: Scene) -> None:
    order = torch.arange(8).flip(0) if scene.rank == 1 else torch.arange(8)
    module = compiled(scene, Net(), batch())
    _steps(module, {name: value[order] for name, value in batch().items()})


@fault(3, "rank 1 passes other labels", on=("dp2",), words=WHOLE)
def other_labels(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    _steps(module, {**batch(), "labels": batch(seed=scene.rank)["labels"]})


@fault(3, "one number of one sample differs on rank 1", on=("dp2",), words=WHOLE)
def one_number(scene: Scene) -> None:
    inputs = batch()
    inputs["x"][3, 5] += scene.rank * 0.25
    _steps(compiled(scene, Net(), batch()), inputs)


class Weighted(Net):
    """A number of Python's among its arguments."""

    def forward(self, x: Tensor, labels: Tensor, weight: float = 1.0) -> Tensor:
        loss: Tensor = super().forward(x, labels) * weight
        return loss


@fault(3, "rank 1 passes another Python number beside the tensors", on=("dp2",), words=ONE)
def other_number(scene: Scene) -> None:
    module = compiled(scene, Weighted(), {**batch(), "weight": 0.5})
    for _ in range(4):
        backward(loss_of(module(**batch(), weight=0.5 + 0.5 * scene.rank)))


@fault(3, 'batch="local" with a part for every rank where ranks of one tp group must see the same samples',
       on=("tp2", "shard2tp2"), words=("rank", "data_shard"))  # fmt: skip
def part_of_each_rank(scene: Scene) -> None:
    module = compiled(scene, Net(), batch(), batch="local")
    count = module.data_shard()[1]
    index = scene.rank % count if count > 1 else 0
    inputs = _mine(batch(seed=scene.rank), index, count)
    _steps(module, inputs)


@fault(3, 'batch="local" with the part that data_shard names', on=("dp2", "shard4", "shard2tp2", "pp2shard2"),
       right=True)  # fmt: skip
def part_of_data_shard(scene: Scene) -> None:
    module = compiled(scene, Net(), batch(), batch="local")
    for seed in range(3):
        expect_step(module, Net(), batch(seed), _mine(batch(seed), *module.data_shard()))


@fault(3, 'batch="local" and rank 1 passes the whole batch', on=("dp2",), words=ONE)
def whole_on_one(scene: Scene) -> None:
    module = compiled(scene, Net(), batch(), batch="local")
    inputs = batch() if scene.rank == 1 else _mine(batch(), *module.data_shard())
    _steps(module, inputs)


@fault(4, "rank 1 skips a step of training", on=("dp2", "shard4", "tp2", "pp2"), words=(*ONE, "step|call"))
def skipped_step(scene: Scene) -> None:
    module, optimizer = compiled(scene, Net(), batch()), None
    optimizer = sgd(module.parameters())
    for step in range(6):
        if step != 2 or scene.rank != 1:
            train(module, optimizer, [batch(step)])


@fault(4, "rank 1 evaluates once more than the others", on=("dp2", "tp4", "pp2"), words=(*ONE, "step|call"))
def one_evaluation_more(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    optimizer = sgd(module.parameters())
    for step in range(5):
        if step == 2:
            module.eval()
            with torch.no_grad():
                for _ in range(1 + (scene.rank == 1)):
                    module(**batch(100))
            module.train()
        train(module, optimizer, [batch(step)])


@fault(4, "only rank 0 evaluates", on=("dp2", "shard4"), words=("rank", "call|step"))
def evaluation_on_one(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    train(module, sgd(module.parameters()), [batch()])
    if scene.rank == 0:
        module.eval()
        with torch.no_grad():
            module(**batch(100))
        module.train()
    train(module, sgd(module.parameters()), [batch(1), batch(2)])


@fault(4, "rank 1 is in eval mode, the others in training", on=("dp2",), words=ONE)
def other_mode(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    module.train(scene.rank != 1)
    _steps(module, batch(), 3)


@fault(4, "rank 1 calls under no_grad, the others do not", on=("dp2", "shard2"), words=ONE)
def no_grad_on_one(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    for _ in range(3):
        with torch.set_grad_enabled(scene.rank != 1):
            loss = loss_of(module(**batch()))
        if loss.requires_grad:
            backward(loss)


@fault(4, "rank 1 leaves out one backward", on=("dp2", "shard4", "tp2"), words=ONE)
def backward_left_out(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    for step in range(4):
        loss = loss_of(module(**batch(step)))
        if step != 1 or scene.rank != 1:
            backward(loss)


@fault(4, "rank 1 has a batch less in its epoch and ends", on=("dp2", "tp4"), words=ONE, culprits={1})
def shorter_epoch(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    train(module, sgd(module.parameters()), [batch(step) for step in range(4 - (scene.rank == 1))])


@fault(4, "only rank 0 saves a checkpoint, as under DDP", on=("dp2", "shard4"), words=("rank", "save"))
def save_on_one(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    optimizer = sgd(module.parameters())
    train(module, optimizer, [batch()])
    if scene.rank == 0:
        autopar.save(scene.folder / "step", module, optimizer)
    train(module, optimizer, [batch(1), batch(2)])


@fault(4, "only rank 0 clips gradients", on=("dp2", "shard4"), words=("rank",))
def clip_on_one(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    optimizer = sgd(module.parameters())
    for step in range(3):
        optimizer.zero_grad()
        backward(loss_of(module(**batch(step))))
        if scene.rank == 0:
            autopar.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()


@fault(4, "two compiled modules are called in another order on rank 1", on=("dp2",), words=("rank",))
def other_order_of_modules(scene: Scene) -> None:
    modules = [compiled(scene, Net(layers=layers), batch()) for layers in (2, 3)]
    for _ in range(3):
        for module in reversed(modules) if scene.rank == 1 else modules:
            backward(loss_of(module(**batch())))


@fault(4, "rank 1 passes another shape than the others", on=("dp2", "shard4", "pp2"),
       words=(r"rank 1 .*\(6, 8\)", r"\(8, 8\)"))  # fmt: skip
def other_shape(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    for _ in range(2):
        backward(loss_of(module(**batch(size=6 if scene.rank == 1 else 8))))


@fault(4, "rank 1 passes another dtype than the others", on=("dp2",), words=("rank 1 .*float64", "float32"))
def other_dtype_of_input(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    inputs = batch()
    inputs["x"] = inputs["x"].double() if scene.rank == 1 else inputs["x"]
    for _ in range(2):
        backward(loss_of(module(**inputs)))


@fault(4, "rank 1 passes one argument less than the others", on=("dp2",), words=ONE)
def argument_left_out(scene: Scene) -> None:
    module = compiled(scene, Weighted(), {**batch(), "weight": 0.5})
    given = batch() if scene.rank == 1 else {**batch(), "weight": 0.5}
    for _ in range(2):
        backward(loss_of(module(**given)))


@fault(4, "rank 1 leaves the loop by an exception of the user's, in the third step", on=("dp2", "shard4"), words=ONE,
       culprits={1})  # fmt: skip
def exception_between_calls(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    optimizer = sgd(module.parameters())
    for step in range(6):
        if step == 2 and scene.rank == 1:
            raise KeyError("a column is missing")
        train(module, optimizer, [batch(step)])


@fault(4, "rank 1 leaves by os._exit in the third step", on=("dp2", "tp2"), words=ONE, culprits={1})
def ended_between_calls(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    optimizer = sgd(module.parameters())
    for step in range(6):
        if step == 2 and scene.rank == 1:
            os._exit(3)
        train(module, optimizer, [batch(step)])
