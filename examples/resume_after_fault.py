"""A run that a fault ends, and that goes on from its last checkpoint when it is started again.

    torchrun --nproc-per-node 2 --max-restarts 1 examples/resume_after_fault.py --fail-at 17
    python examples/resume_after_fault.py                                # on one process, from the same checkpoints

A checkpoint is whole or not there at all, and loads under another plan and another number of processes. Dropout goes on
with the draws that it would have made, so losses are those of a run without the fault.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn

import autopar


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


class Batches:
    """An endless loader that can be saved: `state_dict` says how many batches it has given."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> dict[str, Tensor]:
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(self.position))
        self.position += 1
        return {"x": x, "y": x[:, :4].sum(1, keepdim=True)}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def main(steps: int, folder: str, fail_at: int | None) -> None:
    torch.manual_seed(0)
    batches = Batches()
    example = {"x": torch.zeros(64, 16), "y": torch.zeros(64, 1)}
    module = autopar.compile(Network(), example, optimizer=torch.optim.AdamW)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    beside = {"scheduler": scheduler, "batches": batches}  # whatever has state_dict and load_state_dict

    is_first = os.environ.get("RANK", "0") == "0"
    start = 0
    if Path(folder, "latest.json").exists():
        start = autopar.load(folder, module, optimizer, extra=beside).step
        if is_first:
            print(f"goes on behind step {start}")
    for step in range(start + 1, steps + 1):
        if step == fail_at and start == 0:
            raise RuntimeError(f"a fault at step {step}")
        loss = module(**batches.next())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            autopar.save(folder, module, optimizer, step=step, keep_last=2, extra=beside)
            if is_first:
                print(f"step {step}: loss {loss:.4f}, saved")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", default="fault_run")
    parser.add_argument("--fail-at", type=int)
    main(**vars(parser.parse_args()))
