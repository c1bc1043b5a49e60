"""Which operators draw random numbers, and the input by which a step gives them their seed."""

from __future__ import annotations

from torch import fx

from autopar.passes.implementations.randomness import REWRITES as DRAWING

SEED = "seed"
"""Name of that input: 0-dim int64."""


def is_random(node: fx.Node) -> bool:
    """Whether the operator draws random numbers: dropout, random factories, and attention with dropout."""
    if str(node.target) in DRAWING:
        return True
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "dropout_p" not in names:
        return False
    position = names.index("dropout_p")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    assert isinstance(given, float | int)
    return given > 0.0
