"""Experts on paper: layers of published mixtures on 64 to 2,048 H100, by each way of `ep=`.

    python -m benchmarks.expert_paper [--model mixtral-8x22b] [--nodes 8] [--output FILE]

Two layers of each model between an embedding and a loss, one sequence of 4,096 tokens per device, bf16 and AdamW. Every
row is a plan of dims={"dp_shard": devices / ep, "ep": ep}: its played step, what of it is communication that nothing
hides, and its peak. "free" is what the planner takes of the three for each product.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.console import Console
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.request.expert_parallelism import WAYS
from benchmarks.faults.__main__ import commit
from benchmarks.models import LossOnly, token_inputs
from benchmarks.results import write_results

LAYERS, TOKENS, VOCABULARY = 2, 4096, 32768
NODES = (8, 32, 256)
PER_NODE = 8
DEGREES = (8, 64)
COMMON = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "use_cache": False, "output_router_logits": False}


def _mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        hidden_size=6144, intermediate_size=16384, num_attention_heads=48, num_key_value_heads=8, num_local_experts=8,
        num_experts_per_tok=2, sliding_window=None, max_position_embeddings=TOKENS, **COMMON,
    ))  # fmt: skip


def _qwen() -> nn.Module:
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        hidden_size=4096, moe_intermediate_size=1536, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, decoder_sparse_step=1, max_position_embeddings=TOKENS, **COMMON,
    ))  # fmt: skip


def _deepseek() -> nn.Module:
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
        hidden_size=7168, moe_intermediate_size=2048, num_attention_heads=128, num_key_value_heads=128,
        n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4, n_shared_experts=1,
        first_k_dense_replace=0, q_lora_rank=1536, kv_lora_rank=512, max_position_embeddings=TOKENS, **COMMON,
    ))  # fmt: skip


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "mixtral-8x22b": _mixtral,
    "qwen3-235b-a22b": _qwen,
    "deepseek-v3": _deepseek,
}
"""Sizes of the published configurations."""


def rows(name: str, nodes: int) -> list[dict[str, Any]]:
    """The plans of a model on so many nodes."""
    devices = nodes * PER_NODE
    with torch.device("meta"):
        model = LossOnly(MODELS[name]().bfloat16())
        inputs = token_inputs(VOCABULARY)(devices, TOKENS)
    planner = autopar.Planner(model, inputs, cluster=f"{nodes}x8 H100-SXM", optimizer=torch.optim.AdamW)
    found = []
    for degree in DEGREES:
        for way in (None, *WAYS):
            began = time.process_time()
            row: dict[str, Any] = {
                "model": name, "devices": devices, "ep": degree, "way": way or "free", "commit": commit(),
            }  # fmt: skip
            dims = {"dp_shard": devices // degree, "ep": degree}
            try:
                plan = planner.plan(mode="fast", dims=dims, ep=way)
            except AutoparError as error:
                found.append(row | {"error": f"{type(error).__name__}: {error}"})
                continue
            products = Counter(
                " x ".join(map(str, chosen.axes)) for call, chosen in plan.operators.items() if "/expert_" in call
            )
            found.append(row | {
                "step_seconds": plan.predicted.step_seconds,
                "exposed_communication_seconds": plan.predicted.exposed_communication_seconds,
                "peak_bytes": plan.predicted.peak_bytes, "products": dict(products),
                "planner_cpu_seconds": round(time.process_time() - began, 1),
            })  # fmt: skip
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", "names", multiple=True, type=click.Choice(list(MODELS)), help="Default: all.")
@click.option("--nodes", "sizes", multiple=True, type=int, help="Default: 8, 32 and 256.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path))
def main(names: Sequence[str], sizes: Sequence[int], output: Path | None) -> None:
    """Plan layers of published mixtures of experts."""
    console, found = Console(width=180), list[dict[str, Any]]()
    for name in names or MODELS:
        for nodes in sizes or NODES:
            for row in rows(name, nodes):
                found.append(row)
                console.print(row, highlight=False, markup=False)
            if output is not None:
                write_results(output, {"command": "python -m benchmarks.expert_paper", "rows": found})


if __name__ == "__main__":
    main()
