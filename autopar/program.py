"""Program: one captured or lowered FX graph together with the meaning of its inputs and outputs.

The graph is a `torch.fx.GraphModule` at ATen level that holds forward *and* backward. Its placeholders correspond one
to one to `inputs`, the flat tuple that it returns corresponds one to one to `outputs`. Every call_function node has
`meta["val"]` (fake tensor of the *global* shape, or a tuple of them), `meta["phase"]` ("forward" | "backward") and
`meta["operator"]`, its stable name: `module.path/op#k` (`.../bwd` in backward), which plans use. Placeholders have
"phase" and "operator" too (their `Input.name`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._pytree import TreeSpec

InputRole: TypeAlias = Literal["parameter", "buffer", "input", "tangent", "seed", "statistic"]
OutputRole: TypeAlias = Literal["loss", "output", "guard", "mutation", "statistic", "gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One placeholder.

    name: parameter or buffer name; for inputs the path of the argument ("input_ids", "args.0", "batch.labels");
        for tangents the path of the output. aliases: further names of a tied parameter. batch_dim: which dim of an
        input is the global batch (None: replicated input). on_host: it lies in the memory of the host, as a plan says.
    """

    role: InputRole
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    aliases: tuple[str, ...] = ()
    batch_dim: int | None = None
    on_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One value of the returned tuple. name: path of the output, or the parameter, input or buffer it belongs to.
    requires_grad: the model returns it with a gradient; backward takes one where there is a tangent of its name.

    A "guard" computes what Python read while the forward was captured, and has a `Guard` of its name. A "statistic" is
    what one micro-batch adds to a value of the whole batch; that comes back as the input of its name.
    """

    role: OutputRole
    name: str
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A comparison of a number that was read: the name of a function of `operator`, the other number, the answer."""

    operator: str
    other: float
    answer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A value that Python read while the forward was captured, and that every call must give again.

    name: of the output that computes it; place: who read it, "file:line (source)"; value: what it was. asked: where it
    was only compared, what must be answered alike; none: the value itself must be. is_drawn: random draws alone decide.
    """

    name: str
    place: str
    value: Any
    asked: tuple[Asked, ...] = ()
    is_drawn: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf of the user's output that is no tensor: given back as it was at capture."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A graph, the meaning of its inputs and outputs, and how to flatten the user's arguments.

    Outputs come in the order: mutations, loss and outputs, guards, statistics, gradients. `in_spec` flattens
    (args, kwargs); `tensor_leaves` says which leaf each "input" placeholder takes; `out_spec` rebuilds the user's
    output from the leaves `output_leaves` (indices into `outputs`, or a `Constant`). `reads` names every attribute that
    the captured forward read: (path of the submodule, attribute); `guards` says what it took from values (`branches=`).
    """

    graph_module: torch.fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_spec: TreeSpec
    tensor_leaves: tuple[int, ...]
    out_spec: TreeSpec
    output_leaves: tuple[int | Constant, ...]
    training: bool
    reads: frozenset[tuple[str, str]] = frozenset()
    guards: tuple[Guard, ...] = ()

    @property
    def graph(self) -> torch.fx.Graph:
        """The graph of `graph_module`."""
        return self.graph_module.graph

    @property
    def placeholders(self) -> list[torch.fx.Node]:
        """The input nodes, one per entry of `inputs`."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def returned(self) -> list[torch.fx.Node]:
        """The returned nodes, one per entry of `outputs`."""
        nodes: list[torch.fx.Node] = returned_values(self.graph)
        return nodes


def returned_values(graph: torch.fx.Graph) -> list[Any]:
    """What a graph returns, in order: nodes, and constants such as None."""
    result = graph.output_node().args[0]
    assert isinstance(result, tuple | list)
    return list(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """How an output of the whole batch is made of those of the micro-batches: laid end to end along `dim`, else their
    sum times `scale`, else (both None) that of any of them."""

    dim: int | None = None
    scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroProgram:
    """A step in `count` equal parts of the batch: `program` runs once per part, `whole` is what was captured.

    The loss and the gradients of the whole are sums over the parts, each with the tangent times `loss_scale`. A
    statistic of the whole is the sum of what the parts return times `statistic_scales[name]`. draws: operator that
    draws random numbers -> the dim that holds the samples, outermost in it; its numbers are those of the whole batch.
    """

    program: Program
    whole: Program
    count: int
    loss_scale: float
    statistic_scales: Mapping[str, float]
    joined: Mapping[str, Joined]
    draws: Mapping[str, int]


def in_one_part(whole: Program) -> MicroProgram:
    """The whole batch as its only micro-batch."""
    joined = {output.name: Joined() for output in whole.outputs if output.role == "output"}
    return MicroProgram(
        program=whole, whole=whole, count=1, loss_scale=1.0, statistic_scales={}, joined=joined, draws={}
    )


def batch_size(program: Program) -> int | None:
    """Size of the global batch; None where no input has one, or the inputs disagree."""
    sizes = {e.shape[e.batch_dim] for e in program.inputs if e.role == "input" and e.batch_dim is not None}
    return sizes.pop() if len(sizes) == 1 else None
