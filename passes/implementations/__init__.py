"""Local forms of operators that cannot run on blocks as they are: name (or operator) -> function that emits them.

In: one operator with the operands of this rank (`LocalContext`), in layouts that its rule allows. Out: nodes of this
rank's graph which compute its block, collectives included. A rule names its implementation (`by masked_embedding`):
`IMPLEMENTATIONS`; operators whose arguments hold global sizes or indices are always written anew: `REWRITES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import fx

from autopar.passes.implementations import (
    attention,
    convolutions,
    experts,
    lookups,
    normalisation,
    pooling,
    prefix_sums,
    randomness,
    reductions,
    row_norms,
    sizes,
    softmax,
)
from autopar.passes.local_context import LocalContext

LocalForm: TypeAlias = Callable[[LocalContext, tuple[Any, ...], dict[str, Any]], fx.Node]

IMPLEMENTATIONS: Mapping[str, LocalForm] = {
    **lookups.IMPLEMENTATIONS,
    **experts.IMPLEMENTATIONS,
    **reductions.IMPLEMENTATIONS,
    **normalisation.IMPLEMENTATIONS,
    **row_norms.IMPLEMENTATIONS,
    **softmax.IMPLEMENTATIONS,
    **prefix_sums.IMPLEMENTATIONS,
    **convolutions.IMPLEMENTATIONS,
    **pooling.IMPLEMENTATIONS,
    **attention.IMPLEMENTATIONS,
    **sizes.IMPLEMENTATIONS,
}
REWRITES: Mapping[str, LocalForm] = {
    **sizes.REWRITES,
    **normalisation.REWRITES,
    **convolutions.REWRITES,
    **pooling.REWRITES,
    **randomness.REWRITES,
    **attention.REWRITES,
}
