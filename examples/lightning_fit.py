"""Train a LightningModule: one argument of the Trainer changes.

    python examples/lightning_fit.py
    python examples/lightning_fit.py --devices 2                # Lightning starts the processes itself

Needs lightning: pip install 'autopar[lightning]'. autopar compiles the submodule that has the parameters, `self.net`;
the loss, the metric and the logging around it run as they stand.
"""

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations.lightning import AutoparStrategy

CLASSES = 4


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, CLASSES))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        points, labels = batch
        loss = nn.functional.cross_entropy(self.net(points), labels)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        points, labels = batch
        accuracy = (self.net(points).argmax(-1) == labels).float().mean()
        self.log("accuracy", accuracy, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def points(count: int, seed: int) -> TensorDataset:
    """Noisy points around a centre for each class."""
    draws = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (count,), generator=draws)
    return TensorDataset(centres[labels] + 0.5 * torch.randn(count, 8, generator=draws), labels)


def main(steps: int, devices: int, folder: str) -> None:
    lightning.seed_everything(0, verbose=False)
    module = Classifier()
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=devices,
        strategy=AutoparStrategy(),  # was: strategy="ddp"
        max_steps=steps,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(points(2048, seed=1), batch_size=16), DataLoader(points(64, seed=2), batch_size=32))
    accuracy = trainer.validate(module, DataLoader(points(64, seed=2), batch_size=32), verbose=False)[0]["accuracy"]
    if trainer.is_global_zero:
        print(f"first loss {module.losses[0]:.4f}, last loss {module.losses[-1]:.4f}, accuracy {accuracy:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--folder", default="lightning_run")
    main(**vars(parser.parse_args()))
