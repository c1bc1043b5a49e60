"""Captures by blocks beside whole captures: are they equal, and what do they cost.

    python -m benchmarks.capture_by_blocks zoo [NAME ...]        # every model of the zoo, seven layers deep
    python -m benchmarks.capture_by_blocks seconds [RESULT.json] # CPU seconds of known models at their real sizes

A row of `zoo` says "blocks" where members of a run were left out, else why the whole model was traced; two programs
that differ in a node, a name, an input or the fingerprint end the command with an error.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.blocks.short_traces import whole_traces
from benchmarks.results import commit, write_results
from benchmarks.same_programs import capture_reasons, difference
from benchmarks.zoo import transformers_tiny
from benchmarks.zoo.registry import MODULES, THIRD_PARTY, ZooEntry, entries, installed, make

COMMAND = "python -m benchmarks.capture_by_blocks seconds"
LAYERS = 7
DEEP = tuple(name for name in transformers_tiny.SIZES if "layer" in name or name == "depth")
"""The sizes of a tiny configuration that say how many layers there are."""


def deep(entry: ZooEntry) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of the zoo with LAYERS layers, where its row does not say how many; else as it is."""
    with mock.patch.object(
        transformers_tiny, "SIZES", {**transformers_tiny.SIZES, **dict.fromkeys(DEEP, LAYERS)}
    ):
        try:
            return make(entry)
        except Exception:  # lists of layer kinds that have another length
            pass
    return make(entry)


def compared(entry: ZooEntry) -> str:
    """ "blocks", "no run", "whole: why", or "DIFFERENT: where"."""
    model, inputs = deep(entry)
    options = {"loss_fn": entry.loss_fn, "batch_dims": entry.batch_dims, "training": True}
    kwargs = dict(inputs)
    if entry.loss_fn is not None:
        return _compared(model, *split_for_loss(model, kwargs), options)
    return _compared(model, kwargs, None, options)


def split_for_loss(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """The keywords that the forward takes, and all of them for the loss."""
    names = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in names.values())
    return {k: v for k, v in inputs.items() if takes_all or k in names}, inputs


def _compared(model: nn.Module, kwargs: dict[str, Any], batch: Any, options: dict[str, Any]) -> str:
    try:
        with whole_traces():
            whole = capture(model, (), kwargs, batch=batch, **options)
    except Exception as error:
        return f"not captured: {type(error).__name__} {error}"[:160]
    with capture_reasons() as found:
        program = capture(model, (), kwargs, batch=batch, **options)
    differs = difference(program, whole)
    if differs is not None:
        return f"DIFFERENT: {differs}"
    if not found:
        return "no run"
    return "blocks" if all("are traced" in each for each in found) else found[-1]


def check_zoo(names: list[str]) -> None:
    """Print a row for each model. Raises SystemExit where a program differs."""
    counts: collections.Counter[str] = collections.Counter()
    for entry in entries((*MODULES, *installed(THIRD_PARTY))):
        if names and entry.name not in names:
            continue
        found = compared(entry)
        counts[found.partition(":")[0]] += 1
        print(f"{entry.name}: {found}", flush=True)
    print(dict(counts))
    if "DIFFERENT" in counts:
        raise SystemExit(1)


def measure() -> list[dict[str, Any]]:
    """CPU seconds of a whole capture and of two captures by blocks, the second at half the batch."""
    rows = []
    for name, layers, make_model in KNOWN:
        with torch.device("meta"):
            model, (batch, length) = make_model()
        row: dict[str, Any] = {"model": name, "layers": layers}
        with whole_traces():
            row["whole_s"] = _seconds(model, batch, length)
        row["blocks_s"] = _seconds(model, batch, length)
        row["blocks_again_s"] = _seconds(model, batch // 2, length)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _seconds(model: nn.Module, batch: int, length: int) -> float:
    inputs = {name: torch.empty(batch, length, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    start = time.process_time()
    capture(model, (), inputs, training=True)
    return round(time.process_time() - start, 2)


def _llama(layers: int, width: int, inner: int, heads: int) -> tuple[nn.Module, tuple[int, int]]:
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=8,
        num_hidden_layers=layers,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.to(torch.bfloat16).train(), (32, 8192)


def _gpt2() -> tuple[nn.Module, tuple[int, int]]:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config()).train(), (8, 1024)


KNOWN = (
    ("gpt2-small", 12, _gpt2),
    ("llama-3-8b", 32, lambda: _llama(32, 4096, 14336, 32)),
    ("llama-3-70b", 80, lambda: _llama(80, 8192, 28672, 64)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("zoo", "seconds"))
    parser.add_argument("rest", nargs="*")
    arguments = parser.parse_args()
    if arguments.what == "zoo":
        check_zoo(arguments.rest)
        return
    load = os.getloadavg()[0]
    content = {"commit": commit(), "command": COMMAND, "load_average": load, "rows": measure()}
    if arguments.rest:
        write_results(Path(arguments.rest[0]), content)


if __name__ == "__main__":
    main()
