"""A small GPT trained with products in float8 beside bf16: losses after some hundred steps.

    python -m benchmarks.float8_loss [RESULT.json] [--steps 500]

One process, the demo's model and text (the standard library's sources), the same initial weights and batches. Every
product of a row's pattern runs as its implementation, forward and backward, the head included unless the row says
otherwise; the plan names each. `apart`: the mean loss of the last 50 steps against that of bf16. fp32 stands beside, to
show how far bf16 itself is from it. The rate grows over the first 50 steps: at three times this rate and without
that, the moment at which the loss leaves its first plateau is chance, and bf16 ended 0.9 to 9 % above float8.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import autopar
from autopar.demo.gpt import GPT, GPTConfig
from autopar.demo.text import batch_at, library_text
from benchmarks.results import write_results

CONFIG = GPTConfig(vocabulary=256, positions=64, width=128, heads=4, layers=4)
BATCH, LAST, RATE, WARM_UP = 16, 50, 3e-4, 50
GOAL = 0.005
"""Part of the loss of bf16 by which float8 may be above it (issue: within 0.5 % after 500 steps)."""

Constraints = Mapping[str, Mapping[str, str]]
ROWS: Mapping[str, tuple[str, Constraints | None]] = {
    "fp32": ("fp32", None),
    "bf16": ("bf16", None),
    "fp8_rowwise": ("bf16", {"*": {"implementation": "fp8_rowwise"}}),
    "fp8_rowwise, head in bf16": (
        "bf16",
        {"*": {"implementation": "fp8_rowwise"}, "head": {"implementation": "default"}},
    ),
    "fp8_tensorwise": ("bf16", {"*": {"implementation": "fp8_tensorwise"}}),
}
"""Row -> (precision, constraints)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """loss: mean of the last steps; products: how many run as another implementation than their own."""

    name: str
    loss: float
    products: int
    apart: float = 0.0


def trained(name: str, model: GPT, text: torch.Tensor, steps: int) -> Row:
    """Train a copy of the model."""
    precision, constraints = ROWS[name]
    own = copy.deepcopy(model)
    optimizer = torch.optim.AdamW
    module = autopar.compile(
        own, batch_at(text, 0, BATCH, CONFIG.positions), precision=precision, constraints=constraints,
        optimizer=optimizer, mode="fast",
    )  # fmt: skip
    state = optimizer(module.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        for group in state.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        loss = module(**batch_at(text, step, BATCH, CONFIG.positions))
        loss.backward()
        state.step()
        state.zero_grad()
        losses.append(float(loss.detach()))
    plan = module.plan
    products = sum(operator.implementation != "default" for operator in plan.operators.values())
    return Row(name=name, loss=fmean(losses[-LAST:]), products=products)


def main(arguments: list[str] | None = None) -> None:
    """Train all rows, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    model, text = GPT(CONFIG), library_text()
    found = [trained(name, model, text, given.steps) for name in ROWS]
    bf16 = next(row.loss for row in found if row.name == "bf16")
    found = [replace(row, apart=row.loss / bf16 - 1) for row in found]
    table = Table("row", "products", "mean loss", "against bf16", box=None)
    for row in found:
        table.add_row(row.name, str(row.products), f"{row.loss:.4f}", f"{row.apart:+.2%}")
    Console().print(table)
    if given.output is not None:
        content: dict[str, Any] = {
            "command": f"python -m benchmarks.float8_loss --steps {given.steps}",
            "steps": given.steps, "last": LAST, "goal": GOAL, "model": asdict(CONFIG),
            "rows": [asdict(row) for row in found],
        }  # fmt: skip
        write_results(given.output, content)


if __name__ == "__main__":
    main()
