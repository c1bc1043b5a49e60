"""Where numpy stops the trace of a model, Dynamo's graph of its forward takes the place of the forward.

    np.tanh(x.detach().numpy())    refused by the trace: numpy sees no values
                                   Dynamo writes the same with torch operators, which the trace takes

Dynamo reads bytecode, so it loses what is no part of it: hooks and custom gradients. A model with either, and a graph
with operators of higher order (branches, custom gradients, checkpoints), keeps the error of the trace. What Dynamo's
graph still decides by values (`.item()`) fails in the second trace like in the first. `benchmarks.capture_fallback`
measures what is rescued.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.fx import GraphModule

from autopar._compat import HigherOrderOperator

log = logging.getLogger(__name__)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def dynamo_forward(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Dynamo's graph of `model(*args, **kwargs)` as a function of the same arguments, which reads the tensors that
    the model holds when it is called; None where Dynamo fails too or its graph would lose something."""
    if _has_hooks(model):
        return None
    dynamo = importlib.import_module("torch._dynamo")  # seconds of import, which only a failed trace pays
    dynamo.reset()
    try:
        graph_module: GraphModule = dynamo.export(model)(*args, **kwargs).graph_module
    except Exception as error:  # of whatever class: the error of the trace is what the user sees
        log.debug("Dynamo refuses %s too", type(model).__name__, exc_info=error)
        return None
    if any(isinstance(node.target, HigherOrderOperator) for node in graph_module.graph.nodes):
        return None
    links = _links(graph_module, model)
    return None if links is None else _Forward(graph_module, model, links)


@contextlib.contextmanager
def replaced_forward(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the context `model` computes `forward`."""
    log.warning(
        "%s is captured from Dynamo's graph of its forward: tracing the model itself failed; what Python computed "
        "from anything but tensors is frozen in it",
        type(model).__name__,
    )
    with mock.patch.object(model, "forward", forward):
        yield


class _Forward:
    """Calls a graph with the tensors that stand in the model now: a trace puts its own there."""

    def __init__(self, graph_module: GraphModule, model: nn.Module, links: Mapping[str, str]) -> None:
        self._graph_module, self._model, self._links = graph_module, model, links

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name, path in self._links.items():
            owner, _, key = name.rpartition(".")
            module = self._graph_module.get_submodule(owner)
            holder: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
            holder[key] = _tensor_at(self._model, path)
        return self._graph_module(*args, **kwargs)


def _tensor_at(model: nn.Module, path: str) -> Tensor:
    owner, _, key = path.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), key)
    return found


def _links(graph_module: GraphModule, model: nn.Module) -> dict[str, str] | None:
    """Name of every tensor in the graph -> its name in the model; None where one is not the model's."""
    paths = {id(tensor): path for path, tensor in _tensors_of(model)}
    links = {name: paths.get(id(tensor)) for name, tensor in _tensors_of(graph_module)}
    known = {name: path for name, path in links.items() if path is not None}
    return known if len(known) == len(links) else None


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    parameters = module.named_parameters(remove_duplicate=False)
    return itertools.chain(parameters, module.named_buffers(remove_duplicate=False))


def _has_hooks(model: nn.Module) -> bool:
    on_modules = any(getattr(module, name) for module in model.modules() for name in _HOOKS)
    return on_modules or any(parameter._backward_hooks for parameter in model.parameters())
