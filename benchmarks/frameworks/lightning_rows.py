"""Rows of Lightning: one LightningModule per way of training, and Trainers with their flags."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from autopar.integrations.lightning import AutoparStrategy
from benchmarks.frameworks.framework_models import Points, Texts, gpt2, scorer
from benchmarks.frameworks.framework_row import Run, Stand, row

STEPS = 50


class Language(lightning.LightningModule):
    """A language model that returns its loss; collects the losses of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.model(**batch).loss, batch_size=len(batch["labels"]))

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.model(**batch).loss, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Scheduled(Language):
    """With a learning rate that falls every epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class ByHand(Language):
    """With manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        optimizer.step()
        return loss


class TwoOptimizers(ByHand):
    """With an optimizer for each half of the parameters."""

    def configure_optimizers(self) -> Any:
        weights = list(self.parameters())
        return [torch.optim.SGD(weights[:3], lr=0.1), torch.optim.SGD(weights[3:], lr=0.1)]


class Scores(lightning.LightningModule):
    """Scores of points, fp64, whose loss and accuracy are computed outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = scorer()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        right = (self.net(batch[0]).argmax(-1) == batch[1]).double().mean()
        self.log("accuracy", right, batch_size=len(batch[1]))

    def predict_step(self, batch: Any, index: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Nested(Scores):
    """The model lies deeper, beside a module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.quiet = nn.Softmax(-1)
        self.net = nn.Sequential(scorer())


class Parts(Scores):
    """Parameters in two submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = scorer(), nn.Linear(4, 4).double()


def trainer_of(stand: Stand, *, module: str | None = None, autopar: Any = None, **settings: Any) -> Any:
    """A Trainer of Lightning. settings: its flags."""
    strategy = AutoparStrategy(module=module, autopar=autopar or {}) if stand.ours else "auto"
    given = {
        "max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "default_root_dir": str(stand.folder), "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    } | settings  # fmt: skip
    return lightning.Trainer(accelerator="cpu", devices=stand.processes, strategy=strategy, **given)


def loaders(stand: Stand, data: Any, held: Any) -> tuple[Any, Any]:
    """Of training and validation."""
    return tuple(None if each is None else DataLoader(each, batch_size=stand.batch) for each in (data, held))  # type: ignore[return-value]  # two


def fitted(
    stand: Stand,
    *,
    made: Callable[[], Any] = Language,
    data: Any = None,
    held: Any = None,
    then: Callable[[Any, Any, Any], dict[str, float]] | None = None,
    **settings: Any,
) -> Run:
    """`fit()`. then: what is done afterwards with trainer, module and validation loader, and measured."""
    module, trainer = made(), trainer_of(stand, **settings)
    batches, held_out = loaders(stand, data or Texts(8 * STEPS), held)
    trainer.fit(module, batches, held_out)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics |= then(trainer, module, held_out) if then is not None else {}
    return Run(losses=module.losses, weights=trainer.strategy.lightning_module_state_dict(), metrics=metrics)


def validate(trainer: Any, module: Any, held: Any) -> dict[str, float]:
    """`validate()` of the trained module."""
    return {f"again {name}": value for name, value in trainer.validate(module, held, verbose=False)[0].items()}


def test(trainer: Any, module: Any, held: Any) -> dict[str, float]:
    """`test()` of the trained module."""
    return dict(trainer.test(module, held, verbose=False)[0])


def predict(trainer: Any, module: Any, held: Any) -> dict[str, float]:
    """`predict()` of the trained module."""
    found = torch.cat(trainer.predict(module, held))
    return {"rows": float(len(found)), "sum": float(found.abs().sum())}


def resumed(stand: Stand, **settings: Any) -> Run:
    """A fit of one epoch, saved, and one of two that goes on from it."""
    first, path = trainer_of(stand, **settings), str(stand.folder / "last.ckpt")
    first.fit(Scheduled(), loaders(stand, Texts(200), None)[0])
    first.save_checkpoint(path)
    module, trainer = Scheduled(), trainer_of(stand, **settings, max_epochs=2)
    trainer.fit(module, loaders(stand, Texts(200), None)[0], ckpt_path=path)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    weights = trainer.strategy.lightning_module_state_dict()
    return Run(losses=module.losses, weights=weights, metrics={"lr": rate})


def kept(stand: Stand) -> Run:
    """ModelCheckpoint keeps the two best; the best is read without autopar."""
    callback = ModelCheckpoint(str(stand.folder / "kept"), monitor="val", save_top_k=2, filename="{epoch}")
    found = fitted(stand, data=Texts(80), held=Texts(16, seed=5), max_epochs=4, enable_checkpointing=True,
                   callbacks=[callback])  # fmt: skip
    files = sorted(path.name for path in (stand.folder / "kept").glob("*.ckpt"))
    best = Language.load_from_checkpoint(callback.best_model_path, weights_only=False)
    folders = list((stand.folder / "kept").glob("*.autopar"))
    if stand.ours and len(folders) != 2:
        raise AssertionError(f"{len(folders)} folders beside {files}")
    return Run(losses=found.losses, weights=dict(best.state_dict()), metrics={"files": float(len(files))})


def stopped(stand: Stand) -> Run:
    """EarlyStopping."""
    callback = EarlyStopping("val", mode="max", patience=1)
    return fitted(stand, data=Texts(80), held=Texts(16, seed=5), max_epochs=5, callbacks=[callback])


points: dict[str, Any] = {"data": Points(400), "held": Points(30)}

ROWS = (
    row("lightning", "fit", fitted),
    row("lightning", "a loss outside of the model, AdamW", partial(fitted, made=Scores, **points), precision="fp64"),
    row("lightning", "gradient_clip_val", partial(fitted, gradient_clip_val=0.2)),
    row("lightning", "gradient_clip_algorithm value",
        partial(fitted, gradient_clip_val=0.01, gradient_clip_algorithm="value")),
    row("lightning", "accumulate_grad_batches", partial(fitted, accumulate_grad_batches=4)),
    row("lightning", "a scheduler", partial(fitted, made=Scheduled, data=Texts(200), max_epochs=2)),
    row("lightning", "a short last batch", partial(fitted, data=Texts(45), max_epochs=2)),
    row("lightning", "validation", partial(fitted, held=Texts(30, seed=5))),
    row("lightning", "sanity validation before training",
        partial(fitted, made=Scores, num_sanity_val_steps=2, **points), precision="fp64"),
    row("lightning", "validate", partial(fitted, held=Texts(30, seed=5), then=validate)),
    row("lightning", "test", partial(fitted, held=Texts(30, seed=5), then=test)),
    row("lightning", "predict", partial(fitted, made=Scores, then=predict, **points), precision="fp64"),
    row("lightning", "manual optimization", partial(fitted, made=ByHand)),
    row("lightning", "bf16-mixed", partial(fitted, precision="bf16-mixed"), precision="bf16"),
    row("lightning", "64-true", partial(fitted, precision="64-true")),
    row("lightning", "resume", resumed),
    row("lightning", "resume sharded parameters", partial(resumed, autopar={"dims": {"dp_shard": 2}}),
        change='AutoparStrategy(autopar={"dims": {"dp_shard": 2}})'),
    row("lightning", "ModelCheckpoint and load_from_checkpoint", kept),
    row("lightning", "EarlyStopping", stopped),
    row("lightning", "a model summary", partial(fitted, made=Scores, enable_model_summary=True, **points),
        precision="fp64"),
    row("lightning", "a nested model", partial(fitted, made=Nested, module="net.0", **points), precision="fp64",
        change='AutoparStrategy(module="net.0")'),
    row("lightning", "tensor parallelism", partial(fitted, autopar={"dims": {"tp": 2}}, gradient_clip_val=0.2),
        change='AutoparStrategy(autopar={"dims": {"tp": 2}})'),
    row("lightning", "16-true", partial(fitted, precision="16-true"), refused="fp32, fp64 or bf16"),
    row("lightning", "two optimizers", partial(fitted, made=TwoOptimizers), refused="2 optimizers"),
    row("lightning", "parameters in two submodules", partial(fitted, made=Parts, **points), refused="net, last"),
)  # fmt: skip
