"""Copies begin as early, and are awaited as late, as the bytes that may be under way allow."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.graphs.copy_nodes import COPY_FROM_HOST, COPY_TO_HOST, WAIT_COPY
from autopar.graphs.forward_backward import Partition, SavedTensor
from autopar.graphs.live_ranges import bytes_over_time, memory_events
from autopar.passes.lowering.kept_on_host import with_host_copies
from autopar.passes.overlap.copies_ahead import copies_ahead

SIZE, COUNT = 256, 4
BYTES = SIZE * 4


def _node(graph: fx.Graph, name: str, target: object = None, args: tuple[fx.Node, ...] = ()) -> fx.Node:
    node = graph.placeholder(name) if target is None else graph.create_node("call_function", target, args, name=name)
    node.meta = {"local_shape": (SIZE,), "dtype": torch.float32, "phase": "forward", "operator": name}
    return node


def chain() -> Partition:
    """y1 = x + w0, y2 = y1 + w1, ...: every y but the last is saved; backward multiplies the weights by these."""
    forward, backward = fx.Graph(), fx.Graph()
    weights = [_node(forward, f"w{i}") for i in range(COUNT)]
    values = [_node(forward, "x")]
    for index, weight in enumerate(weights):
        values.append(_node(forward, f"y{index + 1}", torch.add, (values[-1], weight)))
    saved = [*weights, *values[1:-1]]
    forward.output((values[-1], *saved))
    taken = {node.name: _node(backward, node.name) for node in saved}
    gradient = _node(backward, "tangent")
    for index in reversed(range(1, COUNT)):
        gradient = _node(backward, f"g{index}", torch.mul, (gradient, taken[f"w{index}"]))
        gradient = _node(backward, f"h{index}", torch.mul, (gradient, taken[f"y{index}"]))
    backward.output((gradient,))
    return Partition(
        forward=fx.GraphModule({}, forward),
        backward=fx.GraphModule({}, backward),
        saved=tuple(SavedTensor(name=n.name, bytes=BYTES, is_input=n.op == "placeholder") for n in saved),
        parameters=frozenset(node.name for node in weights),
    )


def on_host(ahead: float) -> Partition:
    """Weights and saved values of the chain on the host."""
    saved_of = [f"y{i}" for i in range(1, COUNT)]
    return copies_ahead(with_host_copies(chain(), [f"w{i}" for i in range(COUNT)], saved_of), ahead)


def most_under_way(module: fx.GraphModule, target: object) -> int:
    """Copies of one direction that are started and not awaited, at most."""
    most = now = 0
    for node in module.graph.nodes:
        now += node.target is target
        most = max(most, now)
        now -= node.target is WAIT_COPY and node.args[0].target is target
    return most


def run(partition: Partition) -> torch.Tensor:
    """The gradient that both graphs make."""
    values = [torch.arange(SIZE, dtype=torch.float32) / (i + 1) for i in range(COUNT + 1)]
    _, *saved = partition.forward(*values)
    assert partition.backward is not None
    (gradient,) = partition.backward(*saved, torch.ones(SIZE))
    return gradient  # type: ignore[no-any-return]


@pytest.mark.parametrize(("ahead", "under_way"), [(0.0, 1), (BYTES - 1, 1), (BYTES, 1), (2 * BYTES, 2), (1e9, 4)])
def test_as_many_copies_are_under_way_as_may_be(ahead: float, under_way: int) -> None:
    partition = on_host(ahead)
    assert most_under_way(partition.forward, COPY_FROM_HOST) == under_way
    assert most_under_way(partition.forward, COPY_TO_HOST) == min(under_way, COUNT - 1)
    assert torch.equal(run(partition), run(chain()))


def test_copies_from_the_host_start_in_the_order_of_their_readers() -> None:
    forward = on_host(1e9).forward
    starts = [node.args[0].name for node in forward.graph.nodes if node.target is COPY_FROM_HOST]
    assert starts == [f"w{i}" for i in range(COUNT)]


def test_what_is_under_way_is_held() -> None:
    peaks = [int(bytes_over_time(memory_events(on_host(ahead))).max()) for ahead in (0.0, 2 * BYTES, 1e9)]
    assert peaks[0] < peaks[1] < peaks[2]
    assert peaks[0] == 4 * BYTES, "x, a weight, the value before and the one that is made"
    assert peaks[0] < int(bytes_over_time(memory_events(chain())).max())
