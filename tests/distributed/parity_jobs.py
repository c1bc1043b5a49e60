"""Jobs of the workers that compare models of the zoo, and models of awkward sizes, with the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from autopar.runtime.collectives import host_graphs
from autopar.runtime.kernels.named_calls import NamedGraph
from benchmarks.agreement import Agreement, compare, reference
from benchmarks.zoo.registry import Inputs, zoo_model
from tests.distributed.captured_once import capture_once, compile_once, prepared_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How a compiled model agrees with the plain one, and what its plan says."""

    agreement: Agreement
    replicated_share: float
    placements: dict[str, list[str]]
    notes: tuple[str, ...]
    summary: str


def captured_zoo(name: str, **_: Any) -> bool:
    """Capture a model of the zoo."""
    return capture_once(f"zoo {name}", *zoo_model(name))


def captured_uneven(name: str, **_: Any) -> bool:
    """Capture a model of `UNEVEN`."""
    return capture_once(name, *UNEVEN[name]())


@prepared_by(captured_zoo)
def zoo(name: str, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Parity]:
    """All cases (name -> arguments of compile) of one model of the zoo."""
    return _check(f"zoo {name}", *zoo_model(name), cases)


@prepared_by(captured_uneven)
def uneven(name: str, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Parity]:
    """All cases of one model of `UNEVEN`."""
    torch.manual_seed(0)
    return _check(name, *UNEVEN[name](), cases)


def captured_layer(**_: Any) -> bool:
    """Capture the GPT of one layer."""
    return capture_once("one layer", *_gpt2(batch=8))


@prepared_by(captured_layer)
def one_layer(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Parity]:
    """All cases of a GPT of one layer whose sizes every mesh of eight divides."""
    torch.manual_seed(0)
    return _check("one layer", *_gpt2(batch=8), cases)


@prepared_by(captured_zoo)
def scaled_gather(name: str, factor: float) -> Agreement:
    """Agreement of a ZeRO-3 plan whose emitted gathers are scaled by `factor`."""
    model, inputs = zoo_model(name)
    expected = reference(model, inputs)
    module = compile_once(f"zoo {name}", model, inputs, dims={"dp_shard": 4})
    step, _ = module.step_for((), inputs)
    for call in (step.forward, step.backward):
        assert isinstance(call, NamedGraph)
        graph_module = call.graph_module
        gathers = graph_module.graph.find_nodes(op="call_function", target=host_graphs.all_gather)
        assert gathers
        for node in gathers:
            with graph_module.graph.inserting_before(node):
                scaled = graph_module.graph.call_function(torch.mul, (node.args[0], factor))
            node.args = (scaled, *node.args[1:])
        graph_module.recompile()
    return compare(module, inputs, expected)


def _check(
    name: str, model: nn.Module, inputs: Inputs, cases: Mapping[str, Mapping[str, Any]]
) -> dict[str, Parity]:
    expected = reference(model, inputs)
    found = {}
    for case, arguments in cases.items():
        module = compile_once(name, copy.deepcopy(model), inputs, **arguments)
        plan = module.plan
        found[case] = Parity(
            agreement=compare(module, inputs, expected),
            replicated_share=float(plan.statistics["replicated_flops_share"]),
            placements={name: list(map(str, layout)) for name, layout in plan.placements.items()},
            notes=plan.notes,
            summary=plan.summary(verbose=True),
        )
    return found


def _gpt2(*, vocabulary: int = 96, width: int = 32, heads: int = 4, batch: int = 4) -> tuple[nn.Module, Inputs]:
    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(0, vocabulary, (2, batch, 8))
    return model, {"input_ids": tokens[0], "labels": tokens[1]}


UNEVEN: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "vocabulary 50257": lambda: _gpt2(vocabulary=50257),
    "batch 6": lambda: _gpt2(batch=6),
    "5 heads": lambda: _gpt2(heads=5, width=40),
}
