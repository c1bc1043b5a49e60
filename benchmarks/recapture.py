"""Seconds to capture GPT-2 at a further batch size: traced anew, and computed from two earlier traces.

    python -m benchmarks.recapture [--full] [RESULT.json]

The models lie on meta. `--full` takes GPT-2 small (12 layers, 1024 tokens), else a tiny one. The two programs must have
the same fingerprint.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from autopar.capture import Captures, capture, fingerprint

BATCHES = (8, 4, 6, 12, 16)
TINY = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}


def measure(full: bool) -> dict[str, Any]:
    """One row: median seconds per program of both ways, over the batch sizes after the first two."""
    with torch.device("meta"):
        config = transformers.GPT2Config(**({} if full else TINY))  # type: ignore[arg-type]
        model = transformers.GPT2LMHeadModel(config).train()
    captures = Captures()
    traced, computed = [], []
    for batch in BATCHES:
        inputs = {
            name: torch.empty(batch, model.config.n_positions, dtype=torch.long, device="meta")
            for name in ("input_ids", "labels")
        }
        start = time.perf_counter()
        fresh = capture(model, (), inputs, training=True)
        middle = time.perf_counter()
        program = captures.capture(
            model, (), inputs, loss_fn=None, batch=None, batch_dims=None, training=True, precision=None
        )
        end = time.perf_counter()
        if fingerprint(program) != fingerprint(fresh):
            raise AssertionError(f"batch {batch}: the computed program is not the traced one")
        if batch not in BATCHES[:2]:
            traced.append(middle - start)
            computed.append(end - middle)
    return {
        "model": "gpt2-small" if full else "gpt2-tiny",
        "operators": sum(node.op == "call_function" for node in fresh.graph.nodes),
        "traced_s": sorted(traced)[len(traced) // 2],
        "computed_s": sorted(computed)[len(computed) // 2],
        "traces": captures.traces,
        "computed": captures.computed,
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("result", nargs="?", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(measure(arguments.full), indent=1)
    print(text)
    if arguments.result is not None:
        arguments.result.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
