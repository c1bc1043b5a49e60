"""What drawing costs: CPU seconds of a dropout mask of 4 M elements, whole and for blocks of a cut tensor.

python -m benchmarks.randomness --json benchmarks/results/randomness.json
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import torch

from autopar.ops.random_index import Runs, full_runs, keep_mask
from benchmarks.results import write_results

REPEATS = 5
BLOCKS: dict[str, tuple[tuple[int, ...], Runs]] = {
    "whole": ((2048, 2048), full_runs((2048, 2048))),
    "aligned columns": ((2048, 4096), (((0, 2048),), ((1024, 2048),))),
    "odd columns": ((2048, 4097), (((0, 2048),), ((1023, 2048),))),
}


def cpu_seconds(shape: tuple[int, ...], runs: Runs) -> float:
    """The least CPU time of `REPEATS` masks."""
    seed, times = torch.tensor(1), []
    for _ in range(REPEATS):
        start = time.process_time()
        keep_mask(shape, 0.1, seed, 3, runs)
        times.append(time.process_time() - start)
    return min(times)


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), default=None, help="write the figures here")
def main(path: Path | None) -> None:
    """Measure with one thread, print, and write."""
    torch.set_num_threads(1)
    found = {name: cpu_seconds(shape, runs) for name, (shape, runs) in BLOCKS.items()}
    for name, seconds in found.items():
        print(f"{name}: {seconds:.3f} s")
    if path is not None:
        write_results(path, {"elements": 2048 * 2048, "cpu_seconds": found})


if __name__ == "__main__":
    main()
