"""The rules, one string per operator (the language is described in `language.py`).

One family per module: `table_elementwise`, `table_dims` (reductions and operators along a dim) and `table_matrices`
(products, linear algebra, Fourier transforms); lookups, factories, random draws and losses that stay whole stand here.
Operators whose dims depend on attributes in a way that the language cannot say have a function in `table_functions.py`,
`table_index.py`, ... that returns such a string.

A key is an operator with overload ("aten.sum.dim_IntList") or all overloads of one ("aten.mul"). Elementwise operators
that torch tags as pointwise need no entry (`POINTWISE`).
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.rules.table_dims import DIM_RULES
from autopar.rules.table_elementwise import ELEMENTWISE_RULES
from autopar.rules.table_matrices import MATRIX_RULES

POINTWISE = "...* -> ...*"

_LOOKUPS: Mapping[str, str] = {
    "aten.embedding": "v d, ... -> ... d ; v: sum by masked_embedding ; linear: x -",
    "aten.take": "[...], ... -> ...",
    "aten.index_reduce": "..., [...], ... -> ... ; whole: dim",
}

_FACTORIES: Mapping[str, str] = {
    "aten.full.default": "-> ...",
    "aten.zeros.default": "-> ...",
    "aten.ones.default": "-> ...",
    "aten.empty.memory_format": "-> ...",
    "aten.empty_permuted.default": "-> ...",
    "aten.scalar_tensor.default": "->",
    "aten.arange": "-> i ; i: by offset_arange",
    "aten.range.step": "-> [...]",
    "aten.eye": "-> [...]",
    "aten.linspace.default": "-> [...]",
    "aten.logspace.default": "-> [...]",
    "aten.tril_indices": "-> [...]",
    "aten.triu_indices": "-> [...]",
    "aten.hann_window": "-> [...]",
    "aten.hamming_window": "-> [...]",
    "aten.blackman_window": "-> [...]",
    "aten.bartlett_window": "-> [...]",
}

# the batch is split; a sequence depends on all of its steps and classes
_LOSSES: Mapping[str, str] = {
    "autopar.ctc_loss": "[t] n [c], n [s], n, n -> n ; flops: 20*t*n*s",
    "autopar.ctc_loss_backward": "n, [t] n [c], n [s], n, n -> [t] n [c] ; flops: 60*t*n*s + 5*t*n*c",
}

# every dim may be split, since each element is drawn by its global index
_DRAWS: Mapping[str, str] = {
    "autopar.dropout": "... -> ..., ...",
    "autopar.dropout_backward": "..., ... -> ...",
    "autopar.uniform": "-> ...",
    "autopar.normal": "-> ...",
    "autopar.exponential": "-> ...",
    "autopar.integers": "-> ...",
}

RULES: Mapping[str, str] = {
    **ELEMENTWISE_RULES,
    **DIM_RULES,
    **MATRIX_RULES,
    **_LOOKUPS,
    **_FACTORIES,
    **_LOSSES,
    **_DRAWS,
}
