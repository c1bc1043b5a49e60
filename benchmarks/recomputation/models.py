"""Small networks with the shapes of VGG, MobileNet and U-Net, without norms, and their steps as graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from autopar.capture import capture
from autopar.layouts.placement import Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.time_segments import module_segments
from autopar.planner.one_mesh.fewest_reruns import buffer_of
from autopar.planner.one_mesh.mesh_plan import price
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.prices import tensor_bytes
from autopar.program import Program
from autopar.request import Request
from autopar.rules.engine import tensor_operands
from benchmarks.recomputation.step_graph import StepGraph

BATCH, SIDE = 16, 32


def _convolution(
    channels_in: int, channels_out: int, size: int = 3, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, groups=groups)
    return nn.Sequential(convolution, nn.ReLU())


def vgg() -> nn.Module:
    """Convolutions in three groups of 1, 2 and 2, a pool behind each of the first two."""
    return nn.Sequential(
        _convolution(3, 16), nn.MaxPool2d(2), _convolution(16, 32), _convolution(32, 32), nn.MaxPool2d(2),
        _convolution(32, 64), _convolution(64, 64),
    )  # fmt: skip


def mobilenet() -> nn.Module:
    """A stem and three depthwise separable convolutions."""
    parts = [_convolution(3, 16, stride=2)]
    for channels, stride in ((16, 1), (32, 2), (64, 1)):
        parts.append(_convolution(channels, channels, groups=channels, stride=stride))
        parts.append(_convolution(channels, 2 * channels, 1))
    return nn.Sequential(*parts)


class UNet(nn.Module):
    """Two levels down and up, with skips. forward(x (B, 3, H, W)) -> (B, 8, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_convolution(3, 8), _convolution(8, 16)])
        self.middle = _convolution(16, 32)
        self.up = nn.ModuleList([_convolution(48, 16), _convolution(24, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for part in self.down:
            skips.append(part(x))
            x = nn.functional.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for part in self.up:
            x = part(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return x


class RandomNet(nn.Module):
    """Three to five products and tanh of random widths, and sums with what has the same width; first a product, whose
    backward reads the batch. forward(x (B, 8)) -> (B, W)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        self.layers = nn.ModuleList()
        self.skips: list[int | None] = []
        widths = [8]
        for _ in range(int(random.integers(3, 6))):
            same = [index for index, width in enumerate(widths[:-1]) if width == widths[-1]]
            kind = int(random.integers(0, 3 if same else 2 if len(widths) > 1 else 1))
            width = int(random.choice([8, 16, 32, 64])) if kind == 0 else widths[-1]
            self.layers.append(nn.Linear(widths[-1], width, bias=False) if kind == 0 else nn.Tanh())
            self.skips.append(int(random.choice(same)) if kind == 2 else None)
            widths.append(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for layer, skip in zip(self.layers, self.skips, strict=True):
            values.append(layer(values[-1]) if skip is None else values[-1] + values[skip])
        return values[-1]


MODELS: dict[str, Callable[[], nn.Module]] = {"VGG": vgg, "MobileNet": mobilenet, "U-Net": UNet}


def program_of(name: str) -> Program:
    """Forward and backward of a network under the sum of what it returns."""
    with torch.device("meta"):
        model, x = MODELS[name](), torch.zeros(BATCH, 3, SIDE, SIDE)
    return capture(model, (x,), loss_fn=lambda y, batch: y.sum())


def random_program(seed: int) -> Program:
    """The same of a random network, at a batch that makes activations larger than weights."""
    with torch.device("meta"):
        model, x = RandomNet(seed), torch.zeros(1024, 8)
    return capture(model, (x,), loss_fn=lambda y, batch: y.square().sum())


def step_graph(program: Program, request: Request) -> StepGraph:
    """The operators that autopar's planner decides about, in its order, at its seconds and bytes on one device. What
    only looks at a value holds nothing, as in the lowered program: an expanded gradient, a slice."""
    query = Query.of(program, request)
    built = price(query, Mesh(("d",), (1,)))
    lifetimes = Lifetimes(query.program, module_segments)
    nodes = lifetimes.in_order
    read = [[buffer_of(operand) for operand in tensor_operands(node)] for node in nodes]
    results = [buffer_of(node) for node in query.program.returned]
    values = sorted(
        {value for each in (*read, results) for value in each if value[0] in lifetimes.position},
        key=lambda value: (lifetimes.position[value[0]], value[1]),
    )
    number = {value: index for index, value in enumerate(values)}
    returned = {number[value] for value in results if value in number}
    return StepGraph(
        names=(*(str(node.meta["operator"]) for node in nodes), "returned"),
        seconds=(*(float(built.variables[built.operators[node]].costs[0]) for node in nodes), 0.0),
        reads=(*(tuple(sorted({number[v] for v in each if v in number})) for each in read), tuple(sorted(returned))),
        makers=tuple(lifetimes.position[node] for node, _ in values),
        value_bytes=tuple(int(tensor_bytes(node, output)) for node, output in values),
        forward=sum(node.meta["phase"] != "backward" for node in nodes),
    )
