"""How long the page of a very large plan takes to write and to open: Llama-3.1-405B on 16,384 devices.

    python -m benchmarks.report                     # writes benchmarks/results/report.json
    python -m benchmarks.report --layers 32 --keep page.html

Planning 126 layers takes minutes, so two layers of that width are planned and the second one is repeated: entries and
names have the lengths of the real ones. The simulated step is repeated likewise. "opens" is the wall time
of Chromium until the page has loaded and its script has run, less that of an empty page.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cost_models.chrome_trace import Span
from autopar.plans.parallel_plan import Plan
from autopar.report.html.page import write_report
from autopar.report.html.timeline import RecordedStep
from benchmarks.results import write_results

OUTPUT = Path(__file__).parent / "results" / "report.json"
REPEATED = re.compile(r"(?<=\blayers\.)1(?=\.)")
DIMS = {"dp_replicate": 8, "dp_shard": 64, "tp": 32}
CHROMIUM = shutil.which("chromium")
Entry = TypeVar("Entry")


def two_layers() -> Plan:
    """The plan of the embedding, two layers and the head on 2048 nodes of 8 H100."""
    config = LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_attention_heads=128, num_key_value_heads=8, vocab_size=128256,
        num_hidden_layers=2, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        tokens = torch.empty((2048, 8192), dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    return autopar.plan(
        model, inputs, cluster="2048x8 H100-SXM", dims=DIMS, optimizer=torch.optim.AdamW, precision="bf16", mode="fast"
    )


def repeated(entries: Mapping[str, Entry], layers: int) -> dict[str, Entry]:
    """The entries with those of layer 1 again for layers 2 to `layers` - 1."""
    copies = {
        REPEATED.sub(str(layer), name): entry
        for layer in range(2, layers)
        for name, entry in entries.items()
        if REPEATED.search(name)
    }
    return {**entries, **copies}


def deep(plan: Plan, layers: int) -> Plan:
    """The plan of as many layers."""
    return replace(
        plan,
        parameters=repeated(plan.parameters, layers),
        operators=repeated(plan.operators, layers),
        explanations=repeated(plan.explanations, layers),
    )


def long_step(plan: Plan, ranks: int = 16) -> RecordedStep:
    """A step with one span per operator, and a gather beside every tenth, on as many ranks."""
    spans, memory = [], {}
    length = plan.predicted.step_seconds / len(plan.operators)
    for rank in range(ranks):
        for index, name in enumerate(plan.operators):
            start = index * length
            times = {"start_seconds": start, "end_seconds": start + 0.9 * length}
            spans.append(Span(rank=rank, stream="compute", name=name, **times))
            if index % 10 == 0:
                spans.append(Span(rank=rank, stream="dp_shard", name=f"{name}: all_gather", **times))
        memory[rank] = [(index * length, 1e9 * (1 + index % 40)) for index in range(len(plan.operators))]
    return RecordedStep(spans=tuple(spans), memory=memory)


def opened_seconds(page: Path) -> float:
    """Wall seconds of Chromium from its start until the page's load event, by three tries the fastest."""
    assert CHROMIUM is not None
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
             "--disable-dev-shm-usage", "--dump-dom")  # fmt: skip
    taken = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as profile:
            begin = time.perf_counter()
            subprocess.run([CHROMIUM, *flags, f"--user-data-dir={profile}", page.resolve().as_uri()],
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=True)  # fmt: skip
            taken.append(time.perf_counter() - begin)
    return min(taken)


def measured(plan: Plan, folder: Path) -> dict[str, Any]:
    """Seconds (of CPU) and bytes of a plan's file and page; seconds of opening it."""
    file, page, empty = folder / "plan.json", folder / "plan.html", folder / "empty.html"
    plan.save(file)
    empty.write_text("<!doctype html><title>empty</title>")
    begin = time.process_time()
    loaded = Plan.load(file)
    load = time.process_time() - begin
    begin = time.process_time()
    write_report(loaded, page, timeline=long_step(loaded))
    build = time.process_time() - begin
    opens = None if CHROMIUM is None else round(max(0.0, opened_seconds(page) - opened_seconds(empty)), 2)
    return {
        "parameters": len(plan.parameters),
        "operators": len(plan.operators),
        "plan_bytes": file.stat().st_size,
        "page_bytes": page.stat().st_size,
        "load_cpu_seconds": round(load, 2),
        "build_cpu_seconds": round(build, 2),
        "opens_seconds": opens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--keep", type=Path, help="Where the page is copied.")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measured(deep(two_layers(), arguments.layers), Path(name))
        if arguments.keep:
            shutil.copy(Path(name) / "plan.html", arguments.keep)
    print(found)
    write_results(arguments.output, {"command": f"python -m benchmarks.report --layers {arguments.layers}", **found})


if __name__ == "__main__":
    main()
