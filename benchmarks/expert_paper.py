"""Experts on paper: layers of published mixtures on 64 to 2,048 H100, by each way of `ep=`.

    python -m benchmarks.expert_paper                                                      # all rows, 16 CPU minutes
    python -m benchmarks.expert_paper --model mixtral-8x22b --nodes 8 --output FILE        # some

Two layers of each model between an embedding and a loss, sequences of 4,096 tokens, bf16 and AdamW. Every row is a
plan of dims={"dp_shard": devices / ep, "ep": ep} by one way: its played step, what of it is communication that nothing
hides, its peak, and the bytes that decide in closed form (`closed_form`). A row that has no plan, or runs another way,
says why. What the planner takes without a word is the shortest of the three (`planner/search/expert_ways.py`), so rows
"free" repeat it and plan nothing. On the smallest cluster rows are also dealt out unevenly (`UNEVEN`).
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.console import Console
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.plans.parallelism import expert_way
from autopar.request.axis_ways import LOSSLESS_WAYS as WAYS
from autopar.request.axis_ways import ExpertParallelism
from benchmarks.faults.__main__ import commit
from benchmarks.models import LossOnly, token_inputs
from benchmarks.results import write_results

RESULTS = Path(__file__).parent / "results" / "expert_paper.json"
LAYERS, TOKENS, VOCABULARY = 2, 4096, 32768
NODES = (8, 32, 256)
PER_NODE = 8
DEGREES = (8, 64)
SEQUENCES = (1, 2, 4, 8)
"""Per device."""
UNEVEN = "zipf:0.5"
"""How rows are dealt out to experts (`expert_load=`) beside evenly, on `UNEVEN_AT` nodes and sequences."""
UNEVEN_AT = ((8, 1), (8, 8))
ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sizes of a published configuration. own: arguments of its class of configurations beyond those."""

    model: str
    config: str
    width: int
    hidden: int
    """Inner width of one expert."""
    experts: int
    per_token: int
    hidden_name: str
    experts_name: str
    own: Mapping[str, Any]

    def build(self, layers: int = LAYERS) -> nn.Module:
        """The model of so many layers, on the current default device."""
        names = {self.hidden_name: self.hidden, self.experts_name: self.experts}
        config = getattr(transformers, self.config)(
            num_hidden_layers=layers, vocab_size=VOCABULARY, use_cache=False, output_router_logits=False,
            max_position_embeddings=TOKENS, hidden_size=self.width, num_experts_per_tok=self.per_token, **names,
            **self.own,
        )  # fmt: skip
        model: nn.Module = getattr(transformers, self.model)(config)
        return model


MIXTURES: Mapping[str, Mixture] = {
    "mixtral-8x22b": Mixture(
        model="MixtralForCausalLM", config="MixtralConfig", width=6144, hidden=16384, experts=8, per_token=2,
        hidden_name="intermediate_size", experts_name="num_local_experts",
        own={"num_attention_heads": 48, "num_key_value_heads": 8, "sliding_window": None},
    ),
    "qwen3-235b-a22b": Mixture(
        model="Qwen3MoeForCausalLM", config="Qwen3MoeConfig", width=4096, hidden=1536, experts=128, per_token=8,
        hidden_name="moe_intermediate_size", experts_name="num_experts",
        own={"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "decoder_sparse_step": 1},
    ),
    "deepseek-v3": Mixture(
        model="DeepseekV3ForCausalLM", config="DeepseekV3Config", width=7168, hidden=2048, experts=256, per_token=8,
        hidden_name="moe_intermediate_size", experts_name="n_routed_experts",
        own={"num_attention_heads": 128, "num_key_value_heads": 128, "n_group": 8, "topk_group": 4,
             "n_shared_experts": 1, "first_k_dense_replace": 0, "q_lora_rank": 1536, "kv_lora_rank": 512},
    ),
}  # fmt: skip


def closed_form(mixture: Mixture, ep: int, tokens: int) -> dict[str, int]:
    """Bytes that a device sends or gets in forward of one layer, by way; tokens: of a device.

    dispatch   k T D 2 there and as much back, of which (ep - 1) / ep leave; less where tokens travel once, to ranks
               or to nodes (two_level)
    gather     3 E D H 2 of weights, of which (ep - 1) / ep come
    masked     k T D 2 of each of the ep - 1 others come, and as much goes back
    """
    rows = mixture.per_token * tokens * mixture.width * ELEMENT_BYTES
    weights = 3 * mixture.experts * mixture.width * mixture.hidden * ELEMENT_BYTES
    return {
        "dispatch": 2 * rows * (ep - 1) // ep,
        "two_level": 2 * rows * (ep - 1) // ep,
        "gather": weights * (ep - 1) // ep,
        "masked": 2 * rows * (ep - 1),
    }


def rows(name: str, nodes: int, sequences: int, layers: int = LAYERS) -> Iterator[dict[str, Any]]:
    """The plans of a model on so many nodes, and behind those of each question the shortest as row "free"."""
    devices = nodes * PER_NODE
    with torch.device("meta"):
        model = LossOnly(MIXTURES[name].build(layers).bfloat16())
        inputs = token_inputs(VOCABULARY)(devices * sequences, TOKENS)
    planner = autopar.Planner(model, inputs, cluster=f"{nodes}x{PER_NODE} H100-SXM", optimizer=torch.optim.AdamW)
    loads = (None, UNEVEN) if (nodes, sequences) in UNEVEN_AT else (None,)
    for degree, load in product(DEGREES, loads):
        said = {"model": name, "devices": devices, "sequences_per_device": sequences, "ep": degree}
        said["expert_load"] = load or "even"
        nbytes = closed_form(MIXTURES[name], degree, sequences * TOKENS)
        found = []
        for way in WAYS:
            row = said | {"way": way, "closed_form_bytes": nbytes[way]} | _planned(planner, devices, degree, way, load)
            found.append(row)
            yield row
        yield said | shortest(found)


def _planned(
    planner: autopar.Planner, devices: int, degree: int, way: ExpertParallelism, load: str | None
) -> dict[str, Any]:
    """What a plan says, or why there is none."""
    began = time.process_time()
    try:
        plan = planner.plan(
            mode="fast", dims={"dp_shard": devices // degree, "ep": degree}, ep=way, expert_load=load
        )  # fmt: skip
    except AutoparError as error:
        said = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        return said | {"cpu_seconds": round(time.process_time() - began, 1)}
    refused = [note for note in plan.notes if f"ep={degree}" in note]
    products = Counter(
        " x ".join(map(str, chosen.axes)) for call, chosen in plan.operators.items() if "/expert_" in call
    )
    return {
        "runs_as": expert_way(plan),
        **({"why": refused[0]} if refused else {}),
        "step_seconds": round(plan.predicted.step_seconds, 5),
        "exposed_communication_seconds": round(plan.predicted.exposed_communication_seconds, 5),
        "peak_bytes": round(plan.predicted.peak_bytes),
        "products": dict(products),
        "replicated_experts": sorted({len(experts) for experts in (plan.replicated_experts or {}).values()}),
        "operators_left_free": sum("left free" in note for note in plan.notes),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def shortest(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row "free" of rows of the same question: the shortest step among those that have a plan."""
    planned = [row for row in found if "error" not in row]
    if not planned:
        return {"way": "free", "error": "no way has a plan"}
    best = min(planned, key=lambda row: row["step_seconds"])
    kept = ("step_seconds", "exposed_communication_seconds", "peak_bytes")
    return {"way": "free", "runs_as": best["runs_as"], **{name: best[name] for name in kept}}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", "names", multiple=True, type=click.Choice(list(MIXTURES)), help="Default: all.")
@click.option("--nodes", "sizes", multiple=True, type=int, help="Of 8 devices; default: 8, 32 and 256.")
@click.option("--sequences", "batches", multiple=True, type=int, help="Per device; default: 1, 2, 4, 8.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, show_default=True)
def main(names: Sequence[str], sizes: Sequence[int], batches: Sequence[int], output: Path) -> None:
    """Plan layers of published mixtures of experts."""
    console, found, began = Console(stderr=True, width=200), list[dict[str, Any]](), time.process_time()
    command = shlex.join(["python", "-m", "benchmarks.expert_paper", *sys.argv[1:]])
    for name in names or MIXTURES:
        for nodes in sizes or NODES:
            for sequences in batches or SEQUENCES:
                for row in rows(name, nodes, sequences):
                    found.append(row)
                    console.print(json.dumps(row), highlight=False, markup=False)
                seconds = round(time.process_time() - began, 1)
                write_results(output, {"command": command, "commit": commit(), "cpu_seconds": seconds, "rows": found})


if __name__ == "__main__":
    main()
