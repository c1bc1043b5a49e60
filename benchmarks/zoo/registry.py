"""The registry of the zoo: every architecture is a `ZooEntry` in the tuple `ENTRIES` of one of `MODULES`.

    ENTRIES = (
        ZooEntry(
            name="mlp",
            family="plain",
            build=lambda: MLP(width=32),
            inputs=lambda batch: {"x": torch.randn(batch, 8), "target": torch.randn(batch, 8)},
        ),
    )

    model, inputs = zoo_model("mlp")          # tiny, in training mode, random weights from `seed`

The forward takes the inputs as keywords and returns a loss or something with `.loss`; where it does not, `loss_fn`
makes the loss of output and batch. Modules are imported one after the other, those in plain torch first, until a name
is found: who asks for a plain model never imports transformers.

`THIRD_PARTY` are models as other packages ship them, named "package/model"; `PACKAGES` of a module: what it imports.
"""

from __future__ import annotations

import ast
import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from autopar.request.argument_types import Branch

Inputs: TypeAlias = dict[str, Tensor]
Family: TypeAlias = Literal[
    "causal",
    "masked",
    "encoder-decoder",
    "vision",
    "audio",
    "multimodal",
    "state-space",
    "mixture-of-experts",
    "plain",
    "adapter",
    "diffusion",
    "graph",
    "segmentation",
    "series",
    "tabular",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooEntry:
    """build: makes the module; inputs: batch size -> keywords of forward (and further names that `loss_fn` reads).

    dtype: float64 for models that route tokens: in float32 a rounding difference sends a token to another expert, and
    that is no fault of a plan. notes: what a reader of the results should know. branches, batch_dims: as of
    `autopar.compile`.
    """

    name: str
    family: Family
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    batch: int = 4
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    dtype: torch.dtype = torch.float32
    notes: str = ""
    branches: Branch | None = None
    batch_dims: Mapping[str, int | None] | None = None


MODULES: tuple[str, ...] = (
    "benchmarks.zoo.plain_first",
    "benchmarks.zoo.plain_vision",
    "benchmarks.zoo.plain_sequence",
    "benchmarks.zoo.plain_generative",
    "benchmarks.zoo.plain_evoformer",
    "benchmarks.zoo.plain_science",
    "benchmarks.zoo.transformers_first",
    "benchmarks.zoo.transformers_causal",
    "benchmarks.zoo.transformers_masked",
    "benchmarks.zoo.transformers_seq2seq",
    "benchmarks.zoo.transformers_vision",
    "benchmarks.zoo.transformers_audio",
    "benchmarks.zoo.transformers_multimodal",
    "benchmarks.zoo.transformers_state_space",
    "benchmarks.zoo.transformers_experts",
)
"""Where entries live, plain torch first."""

THIRD_PARTY: tuple[str, ...] = tuple(
    f"benchmarks.zoo.third_party.{path.stem}"
    for path in sorted((Path(__file__).parent / "third_party").glob("*_models.py"))
)
"""Where entries of other packages live, a module for each package or few."""

CI_ROWS: tuple[str, ...] = (
    "resnet",
    "lstm_seq2seq",
    "graph_network",
    "starcoder2",
    "bert",
    "marian",
    "sew",
    "altclip",
    "mamba",
    "mixtral",
)
"""The rows that `.ci/run` executes: cheap, and one of every kind."""


def entries(modules: Sequence[str] = MODULES) -> Iterator[ZooEntry]:
    """All entries, importing one module after the other."""
    for module in modules:
        yield from importlib.import_module(module).ENTRIES


def installed(modules: Sequence[str] = THIRD_PARTY) -> list[str]:
    """Those whose `PACKAGES` can all be imported; nothing is imported to find out."""
    return [module for module in modules if all(find_spec(name) for name in packages_of(module))]


def packages_of(module: str) -> tuple[str, ...]:
    """The tuple `PACKAGES` that stands in the source of a module: what it imports, by import name."""
    path = Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "PACKAGES":
            return tuple(ast.literal_eval(statement.value))
    return ()


def find_entry(name: str, modules: Sequence[str] = MODULES) -> ZooEntry:
    """The entry of that name. Raises KeyError with the names that there are."""
    for entry in entries(modules):
        if entry.name == name:
            return entry
    raise KeyError(f"no model {name!r} in the zoo; there are {', '.join(entry.name for entry in entries(modules))}")


def make(entry: ZooEntry, *, batch: int | None = None, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """The model in training mode and its inputs, both of the entry's precision, with values from `seed`."""
    torch.manual_seed(seed)
    random.seed(seed)  # packages that choose by Python's numbers, which a forked process draws anew
    model = entry.build().train()
    if entry.dtype != torch.get_default_dtype():
        model = model.to(entry.dtype)
    inputs = entry.inputs(batch or entry.batch)
    return model, {
        name: value.to(entry.dtype) if value.is_floating_point() else value for name, value in inputs.items()
    }


def zoo_model(name: str, *, batch: int | None = None, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """Model and inputs of the entry `name`."""
    return make(find_entry(name), batch=batch, seed=seed)
