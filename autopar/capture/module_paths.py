"""Which submodule runs an operator, written on every node of a trace.

    with module_paths(root):
        ...   # nodes traced inside `root.layers[0].mlp` carry the stack ("layers", "layers.0", "layers.0.mlp")

Hooks on every module call keep the stack; torch copies it to a node when it makes one, and AOT autograd copies it
from an operator to its backward operators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import traceback
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_STACK = "nn_module_stack"


@contextlib.contextmanager
def module_paths(root: nn.Module) -> Iterator[None]:
    """Within the context, traced nodes know the submodules of `root` that were running."""
    names: dict[int, str] = {}
    for name, module in root.named_modules():
        names.setdefault(id(module), name)
    stacks: list[dict[str, tuple[str, str]]] = [{}]

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) in names:
            name = names[id(module)]
            stacks.append({**stacks[-1], name: (name, type(module).__qualname__)})
            traceback.current_meta[_STACK] = stacks[-1]

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in names:
            stacks.pop()
            traceback.current_meta[_STACK] = stacks[-1]

    with contextlib.ExitStack() as stack:
        stack.enter_context(traceback.preserve_node_meta())
        for hook in (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)):
            stack.callback(hook.remove)
        yield
