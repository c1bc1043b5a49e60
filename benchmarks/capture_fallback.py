"""What a Dynamo fallback would rescue: constructs of Python that a trace of the model itself may refuse.

    python -m benchmarks.capture_fallback --output benchmarks/results/capture_fallback.json

Per construct: whether capture takes it, `fallback.py` included; whether `torch._dynamo.export` and
`torch.export.export(strict=True)` make a graph of it; and whether that graph computes the same for a second input,
whose values differ. A graph that froze a value, or lost a custom gradient, is wrong and rescues nothing.
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError
from benchmarks.results import write_results

SIZE = 8
Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """A linear layer around one construct."""

    def __init__(self, construct: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.construct = construct
        self.table = {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        """(B, SIZE) -> 0-dim loss."""
        return self.construct(self, x).square().mean()


class Tagged(Tensor):
    """A subclass that doubles the result of every add."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions of tensors of this class."""
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result * 2 if func in (torch.add, Tensor.add) else result


def numpy_on_values(model: Model, x: Tensor) -> Tensor:
    return model.linear(x) * torch.from_numpy(np.tanh(x.detach().numpy()))  # type: ignore[no-any-return]


def numpy_on_constants(model: Model, x: Tensor) -> Tensor:
    return model.linear(x) * torch.from_numpy(np.hanning(SIZE).astype(np.float32))  # type: ignore[no-any-return]


def numpy_round_trip(model: Model, x: Tensor) -> Tensor:
    return model.linear(x) + float(np.mean(x.detach().numpy()))  # type: ignore[no-any-return]


def closure(model: Model, x: Tensor) -> Tensor:
    seen: list[Tensor] = []

    def layer(value: Tensor) -> Tensor:
        seen.append(model.linear(value))
        return seen[-1].relu()

    return layer(layer(x)) + seen[0]


def cond(model: Model, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda v: model.linear(v), lambda v: -model.linear(v), (x,))  # type: ignore[no-any-return]


def branch_on_values(model: Model, x: Tensor) -> Tensor:
    hidden: Tensor = model.linear(x)
    return hidden if x.sum() > 0 else -hidden


def item_as_shape(model: Model, x: Tensor) -> Tensor:
    length = int(x.argmax(1)[0].item()) + 1
    return model.linear(x)[:, :length].sum(1)  # type: ignore[no-any-return]


def item_as_number(model: Model, x: Tensor) -> Tensor:
    return model.linear(x) * x.abs().max().item()  # type: ignore[no-any-return]


def dict_mutation(model: Model, x: Tensor) -> Tensor:
    cache = {"x": x}
    cache["hidden"] = model.linear(cache.pop("x"))
    cache.update(model.table)  # type: ignore[arg-type]
    return cache["hidden"] * cache["scale"]


def tensor_subclass(model: Model, x: Tensor) -> Tensor:
    return torch.add(model.linear(x).as_subclass(Tagged), 1.0).as_subclass(Tensor)


def partial_function(model: Model, x: Tensor) -> Tensor:
    return functools.partial(torch.clamp, min=0.1)(model.linear(x))


def generator(model: Model, x: Tensor) -> Tensor:
    def rows() -> Iterator[Tensor]:
        for part in x.chunk(2, dim=1):
            yield part * 2

    return model.linear(torch.cat(list(rows()), dim=1))  # type: ignore[no-any-return]


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _disabled(value: Tensor) -> Tensor:
    return value.tanh()


def dynamo_disabled(model: Model, x: Tensor) -> Tensor:
    return _disabled(model.linear(x))  # type: ignore[no-any-return]


def tensor_data(model: Model, x: Tensor) -> Tensor:
    hidden: Tensor = model.linear(x)
    return hidden - hidden.data.mean()


def list_of_values(model: Model, x: Tensor) -> Tensor:
    weights = x[:, 0].tolist()
    return model.linear(x) * sum(weights)  # type: ignore[no-any-return]


def backward_inside(model: Model, x: Tensor) -> Tensor:
    hidden = model.linear(x)
    (slope,) = torch.autograd.grad(hidden.sum(), model.linear.weight, create_graph=True)
    return hidden + slope.mean()  # type: ignore[no-any-return]


def while_on_values(model: Model, x: Tensor) -> Tensor:
    hidden: Tensor = model.linear(x)
    while hidden.norm() > 1:
        hidden = hidden / 2
    return hidden


CONSTRUCTS: tuple[Forward, ...] = (
    numpy_on_values,
    numpy_on_constants,
    numpy_round_trip,
    closure,
    cond,
    branch_on_values,
    item_as_shape,
    item_as_number,
    dict_mutation,
    tensor_subclass,
    partial_function,
    generator,
    dynamo_disabled,
    tensor_data,
    list_of_values,
    backward_inside,
    while_on_values,
)


def taken_by_capture(construct: Forward) -> str:
    """ "taken" or "refused"."""
    try:
        capture(Model(construct), (_input(0),))
    except CaptureError:
        return "refused"
    return "taken"


def taken_by(exporter: Callable[[nn.Module, Tensor], Callable[[Tensor], Any]], construct: Forward) -> str:
    """ "right", "wrong" (another loss or gradient for a second input) or the class of the error."""
    torch._dynamo.reset()
    model = Model(construct)
    plain = copy.deepcopy(model)
    try:
        graph = exporter(model, _input(0))
    except Exception as error:
        return type(error).__name__
    try:
        same = _same(graph, model, plain)
    except Exception as error:
        return f"graph fails: {type(error).__name__}"
    return "right" if same else "wrong"


def _same(graph: Callable[[Tensor], Any], model: nn.Module, plain: nn.Module) -> bool:
    """Whether loss and gradients agree for two inputs: the one of the export, and one of other signs and sizes."""
    for seed in (0, 1):
        losses = [_loss(graph(_input(seed))), _loss(plain(_input(seed)))]
        owner = graph if isinstance(graph, nn.Module) else model
        found = torch.autograd.grad(losses[0], [p for p in owner.parameters() if p.requires_grad])
        expected = torch.autograd.grad(losses[1], list(plain.parameters()))
        pairs = [(losses[0], losses[1]), *zip(found, expected, strict=True)]
        if not all(torch.allclose(one, two, rtol=1e-4, atol=1e-6) for one, two in pairs):
            return False
    return True


def _loss(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple | list) else output
    return found


def _input(seed: int) -> Tensor:
    sign = -1.0 if seed else 1.0
    return sign * (1 + seed) * torch.rand(4, SIZE, generator=torch.Generator().manual_seed(seed))


def dynamo_export(model: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
    """`torch._dynamo.export`: the graph of the forward's bytecode."""
    return torch._dynamo.export(model)(x).graph_module


def strict_export(model: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
    """`torch.export.export(strict=True)`."""
    return torch.export.export(model, (x,), strict=True).module()


def measure() -> list[dict[str, str]]:
    """One row per construct; Dynamo prints the graphs of what it refuses to stderr."""
    return [
        {
            "construct": construct.__name__,
            "capture": taken_by_capture(construct),
            "dynamo": taken_by(dynamo_export, construct),
            "strict export": taken_by(strict_export, construct),
        }
        for construct in CONSTRUCTS
    ]


def main() -> None:
    """Print the table; write the JSON document with --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the JSON document here")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    rows = measure()
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
    if options.output is not None:
        write_results(options.output, {"rows": rows})


if __name__ == "__main__":
    main()
