"""All rows of context parity: models with attention, and the families that mix a sequence by other means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.context_parity.models import MODELS, Case
from benchmarks.context_parity.sequence_models import FAMILIES

TOKENS = 64
"""So that 8 ranks divide the chunks of Mamba-2, of 8 tokens."""
LENGTHS: Mapping[str, int] = {"rwkv": 16, "evoformer": 16}
"""Of models that loop over the tokens, or hold all pairs of them."""
ROWS: Mapping[str, Callable[[], Case]] = {
    **MODELS,
    **{name: partial(build, LENGTHS.get(name, TOKENS)) for name, build in FAMILIES.items()},
}
"""Name -> model and the keywords of its forward."""
WITHOUT_ATTENTION = frozenset(FAMILIES) - {"bamba", "conformer", "t5"}
"""Those for which `cp` names no way."""
