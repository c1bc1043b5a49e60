"""Forward hooks that give nothing back: a graph holds what a hook computes, and nothing of what it prints or collects.

    module.register_forward_hook(lambda m, args, out: out * 2)            in the graph, in every call
    module.register_forward_hook(lambda m, args, out: seen.append(out))   runs while the model is traced only: a warning
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from autopar._compat import GLOBAL_HOOKS
from autopar.capture.python_values import is_of_user

log = logging.getLogger(__name__)

_KINDS = {"_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook"}


@contextlib.contextmanager
def reported_hooks(model: nn.Module) -> Iterator[None]:
    """Behind the context, the log names the users' hooks that ran inside and gave nothing back."""
    seen = _SeenHooks()
    with contextlib.ExitStack() as stack:
        places = [(f"of {path or 'the model'}", vars(module)) for path, module in model.named_modules()]
        for place, owner in [*places, ("for all modules", GLOBAL_HOOKS)]:
            for kind, words in _KINDS.items():
                hooks = owner[kind]
                stack.callback(hooks.update, dict(hooks))
                for key, hook in hooks.items():
                    if is_of_user(getattr(hook, "__module__", None)):
                        what = f"the {words} {getattr(hook, '__qualname__', hook)} {place}"
                        hooks[key] = functools.partial(seen.run, hook, what)
        yield
    for what in sorted(seen.ran - seen.gave):
        log.warning(
            "%s gives nothing back: compiled calls do not run it. What it computes into the model's tensors is part of "
            "the graph; what it prints, counts or collects is not: return what it needs from forward as an output",
            what,
        )


class _SeenHooks:
    """Which hooks ran, and which of them gave something back."""

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self.gave: set[str] = set()

    def run(self, hook: Callable[..., Any], what: str, *args: Any, **kwargs: Any) -> Any:
        """What the hook gives back."""
        result = hook(*args, **kwargs)
        self.ran.add(what)
        if result is not None:
            self.gave.add(what)
        return result
