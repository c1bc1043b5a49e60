"""Keep Hugging Face models simple while they are traced: the causal flag instead of a mask, no key-value cache.

While tracing, transformers writes the causal mask out as a (batch, 1, S, S) tensor in every model, which forbids fast
kernels and costs memory. Where the user passed neither an attention mask nor positions, the mask is exactly the
causal flag, so the two functions that decide are replaced while the trace runs. transformers itself is not imported:
a model made of it has done so.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from torch import Tensor, nn

log = logging.getLogger(__name__)

_MASKS = "transformers.masking_utils"
_DECISIONS = {
    "find_packed_sequence_indices": lambda position_ids: None,
    "is_torchdynamo_exporting": lambda: False,
}


def is_huggingface(model: nn.Module) -> bool:
    """Whether a class of transformers takes part in the model."""
    return any(type(module).__module__.startswith("transformers.") for module in model.modules())


@contextlib.contextmanager
def adapted_huggingface(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Within the context, Hugging Face models trace with causal flags and without a cache; then all is restored."""
    with contextlib.ExitStack() as stack:
        if is_huggingface(model):
            if not any(kwargs.get(name) is not None for name in ("attention_mask", "position_ids")):
                _keep_causal_flags(stack)
            if not kwargs.get("use_cache"):
                _disable_cache(stack, model)
        yield


def _keep_causal_flags(stack: contextlib.ExitStack) -> None:
    masks = sys.modules.get(_MASKS)
    for name, decision in _DECISIONS.items():
        if masks is not None and hasattr(masks, name):
            stack.enter_context(mock.patch.object(masks, name, decision))
        else:
            log.warning("%s.%s not found: causal masks will be written out as tensors", _MASKS, name)


def _disable_cache(stack: contextlib.ExitStack, model: nn.Module) -> None:
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    for config in configs.values():
        if not isinstance(config, Tensor) and getattr(config, "use_cache", False):
            stack.enter_context(mock.patch.object(config, "use_cache", False))
