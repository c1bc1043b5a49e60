"""Later: names whose modules are loaded when the name is first used, each said in one line at the top of a file.

    plan = later("autopar.api", "plan")                                 plan(model, ...) loads autopar.api, and torch
    __getattr__ = names_later(globals(), {"compile": "autopar.api"})    the same for the names of a package

torch takes seconds to load, and reading a plan, printing help or refusing a mistyped option needs none of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def later(module: str, name: str) -> Callable[..., Any]:
    """The function or class `name` of a module that the first call loads."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"`{module}.{name}`, loaded by the first call."
    return call


def names_later(namespace: dict[str, Any], modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package (PEP 562). modules: public name -> its module; what was asked for once stays in
    the namespace. Raises AttributeError for other names."""

    def getattr_of_package(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        namespace[name] = found = getattr(importlib.import_module(modules[name]), name)
        return found

    return getattr_of_package
