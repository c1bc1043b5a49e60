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
    attention_ring,
    convolutions,
    lookups,
    moved_rows,
    normalisation,
    pooling,
    randomness,
    row_norms,
    sharded_attention,
    sharded_cross_entropy,
    sharded_experts,
    sharded_prefix_sums,
    sharded_reductions,
    sharded_softmax,
    sizes,
)
from autopar.passes.implementations.local_context import LocalContext

LocalForm: TypeAlias = Callable[[LocalContext, tuple[Any, ...], dict[str, Any]], fx.Node]

IMPLEMENTATIONS: Mapping[str, LocalForm] = {
    **lookups.IMPLEMENTATIONS,
    **sharded_experts.IMPLEMENTATIONS,
    **sharded_reductions.IMPLEMENTATIONS,
    **normalisation.IMPLEMENTATIONS,
    **row_norms.IMPLEMENTATIONS,
    **sharded_softmax.IMPLEMENTATIONS,
    **sharded_cross_entropy.IMPLEMENTATIONS,
    **sharded_prefix_sums.IMPLEMENTATIONS,
    **convolutions.IMPLEMENTATIONS,
    **moved_rows.IMPLEMENTATIONS,
    **pooling.IMPLEMENTATIONS,
    **sharded_attention.IMPLEMENTATIONS,
    **attention_ring.IMPLEMENTATIONS,
    **sizes.IMPLEMENTATIONS,
}
REWRITES: Mapping[str, LocalForm] = {
    **sizes.REWRITES,
    **normalisation.REWRITES,
    **convolutions.REWRITES,
    **pooling.REWRITES,
    **randomness.REWRITES,
    **sharded_attention.REWRITES,
}
