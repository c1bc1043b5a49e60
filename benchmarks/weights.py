"""Real weights: what every rank reads of a folder and holds while it does, under three plans.

    python -m benchmarks.weights [--layers N] [--json] [RESULT.json]

A Llama in bf16 is written into a folder of shards, compiled on meta with `weights=` that folder on four gloo processes
of this machine, and saved again. Per plan and rank: bytes read (those that the reader counts, and those that the kernel
counts for the process) beside the bytes of the rank's blocks; peak of the resident memory, above what the process held
before the read, beside the size of the model; seconds of the slowest rank. Saving gathers and writes one tensor after
the other: its peak is a few copies of the largest tensor, whatever the model has.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch import nn

import autopar
from autopar.runtime.parameters import local_tensor
from autopar.runtime.weights import shard_model
from autopar.runtime.weights.block_reader import BlockReader
from benchmarks.results import document, write_results
from benchmarks.workers import Pool

RANKS, BATCH, LENGTH = 4, 8, 32
PLANS = {"replicated": {"dp_replicate": RANKS}, "ZeRO-3": {"dp_shard": RANKS}, "tensor parallel": {"tp": RANKS}}


def llama(layers: int) -> nn.Module:
    """29 million parameters, and 13 million more with every layer."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=1024, intermediate_size=2816, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=14_208, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.to(torch.bfloat16)


def write_folder(folder: str, layers: int) -> None:
    """Job of one process: the folder of a model, drawn and saved by transformers."""
    torch.manual_seed(0)
    model: Any = llama(layers)
    model.save_pretrained(folder, max_shard_size="100MB")


@contextmanager
def measured(found: dict[str, Any], name: str) -> Iterator[None]:
    """Seconds, bytes that the kernel counts as read, and the peak of resident memory above what is held before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    held, read, start = _proc("status", "VmRSS") * 1024, _proc("io", "rchar"), time.perf_counter()
    yield
    found[f"{name}_seconds"] = time.perf_counter() - start
    found[f"{name}_kernel_bytes"] = _proc("io", "rchar") - read
    found[f"{name}_peak_bytes"] = _proc("status", "VmHWM") * 1024 - held


def _proc(file: str, field: str) -> int:
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def read_and_save(dims: dict[str, int], folder: str, out: str, layers: int) -> dict[str, Any]:
    """Job of a rank."""
    found: dict[str, Any] = {}
    counts: list[int] = []
    closed = BlockReader.__exit__
    read: Callable[..., Any] = shard_model.read_weights

    def counted(reader: BlockReader, *error: object) -> None:
        counts.append(reader.bytes_read)
        closed(reader, *error)

    def watched(*arguments: Any) -> Any:
        dist.barrier()
        with measured(found, "read"):
            return read(*arguments)

    BlockReader.__exit__ = counted  # type: ignore[method-assign]
    shard_model.read_weights = watched  # type: ignore[assignment]
    try:
        with torch.device("meta"):
            model = llama(layers)
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        module = autopar.compile(model, {"input_ids": tokens, "labels": tokens}, dims=dims, mode="fast", weights=folder)
    finally:
        BlockReader.__exit__ = closed  # type: ignore[method-assign]
        shard_model.read_weights = read
    blocks = [local_tensor(parameter) for parameter in module.parameters()]
    found["block_bytes"] = sum(block.numel() * block.element_size() for block in blocks)
    found["read_bytes"] = sum(counts)
    found["model_bytes"] = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    found["largest_tensor_bytes"] = max(p.numel() * p.element_size() for p in module.parameters())
    with measured(found, "save"):
        module.save_pretrained(out, max_shard_size="100MB")
    return found


def measure(layers: int) -> list[dict[str, Any]]:
    """One row per plan."""
    rows = []
    for name, dims in PLANS.items():
        with tempfile.TemporaryDirectory() as folder:
            _alone("benchmarks.weights:write_folder", folder=f"{folder}/in", layers=layers)
            pool = Pool(RANKS)
            try:
                ranks = pool.run(
                    "benchmarks.weights:read_and_save", world_size=RANKS, timeout=500.0, dims=dims,
                    folder=f"{folder}/in", out=f"{folder}/out", layers=layers,
                )  # fmt: skip
            finally:
                pool.close()
            rows.append({"plan": name, "dims": dims, **_row(ranks), "saved_equals": _equal(folder)})
    return rows


def _alone(target: str, **arguments: Any) -> None:
    """A job in a process of its own, so that what it holds is in no other's memory."""
    pool = Pool(1)
    try:
        pool.run(target, world_size=1, timeout=300.0, **arguments)
    finally:
        pool.close()


def _row(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    each = ("block_bytes", "read_bytes", "read_kernel_bytes", "read_peak_bytes")
    return {
        "model_bytes": ranks[0]["model_bytes"],
        "largest_tensor_bytes": ranks[0]["largest_tensor_bytes"],
        **{name: [rank[name] for rank in ranks] for name in each},
        "read_over_blocks": max(rank["read_bytes"] / rank["block_bytes"] for rank in ranks),
        "peak_over_model": max(rank["read_peak_bytes"] / rank["model_bytes"] for rank in ranks),
        "read_seconds": max(rank["read_seconds"] for rank in ranks),
        "save_peak_bytes": [rank["save_peak_bytes"] for rank in ranks],
        "save_seconds": max(rank["save_seconds"] for rank in ranks),
    }


def _equal(folder: str) -> bool:
    """Whether what was saved is what was read, byte by byte, tensor after tensor."""
    there = {path: safetensors_of(Path(folder) / path) for path in ("in", "out")}
    return there["in"].keys() == there["out"].keys() and all(
        torch.equal(_tensor(file, name), _tensor(there["out"][name], name)) for name, file in there["in"].items()
    )


def safetensors_of(folder: Path) -> dict[str, Path]:
    """Name -> file, as the index says."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {name: folder / file for name, file in index["weight_map"].items()}


def _tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
        return tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("result", nargs="?", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.layers)
    content = {"command": ["python", "-m", "benchmarks.weights", *sys.argv[1:]], "rows": rows}
    if arguments.json:
        print(json.dumps(document(content), indent=1))
    else:
        for row in rows:
            print(
                f"{row['plan']:16} read {max(row['read_bytes']) / 1e6:6.1f} MB of {row['model_bytes'] / 1e6:.1f} "
                f"({row['read_over_blocks']:.3f} of the blocks), peak {max(row['read_peak_bytes']) / 1e6:6.1f} MB, "
                f"{row['read_seconds']:.2f} s; saved in {row['save_seconds']:.2f} s, "
                f"peak {max(row['save_peak_bytes']) / 1e6:.1f} MB"
            )
    if arguments.result is not None:
        write_results(arguments.result, content)


if __name__ == "__main__":
    main()
