"""Keep Hugging Face models simple while they are traced: causal flags, no key-value cache, no checks of values.

While tracing, transformers writes the causal mask out as a (batch, 1, S, S) tensor in every model, which forbids fast
kernels and costs memory. Where the user passed neither an attention mask nor positions, the mask is exactly the
causal flag, so the two functions that decide are replaced while the trace runs. Its checks of tensor values (as many
image tokens as image features) would decide by values that a trace does not have; transformers has a switch that
leaves them out. Its hooks that collect hidden states are installed before the trace. transformers itself is not
imported: a model made of it has done so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from torch import Tensor, nn

log = logging.getLogger(__name__)

_MASKS = "transformers.masking_utils"
_MODELS = "transformers.modeling_utils"
_OUTPUTS = "transformers.utils.output_capturing"
_DECISIONS = {
    "find_packed_sequence_indices": lambda position_ids: None,
    "is_torchdynamo_exporting": lambda: False,
}
_MAKE_MASKS_UNLESS_COMPILING = ("longt5", "pop2piano", "switch_transformers", "udop")
"""Models that make their mask of ones only while nobody compiles, and fail without one."""
_WITHOUT_CHECKS = {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"}  # read by transformers at every check


def is_huggingface(model: nn.Module) -> bool:
    """Whether a class of transformers takes part in the model."""
    return any(type(module).__module__.startswith("transformers.") for module in model.modules())


def is_cache(leaf: object) -> bool:
    """Whether an output is a cache of keys and values: None where a caller did not ask for one (prefix tuning)."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(leaf).__mro__)


@contextlib.contextmanager
def adapted_huggingface(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Within the context, Hugging Face models trace with causal flags, without cache and checks; hooks alone remain."""
    with contextlib.ExitStack() as stack:
        if is_huggingface(model):
            stack.enter_context(mock.patch.dict(os.environ, _WITHOUT_CHECKS))
            _install_output_hooks(model)
            _scan_at_once(stack, model)
            if not any(kwargs.get(name) is not None for name in ("attention_mask", "position_ids")):
                _keep_causal_flags(stack)
                _let_models_make_masks(stack)
            if not kwargs.get("use_cache"):
                _disable_cache(stack, model)
        yield


def _install_output_hooks(model: nn.Module) -> None:
    """The hooks that collect hidden states, before the trace: those that a forward installs in a trace are lost.

    They stay, as after any forward of the model, and do nothing until a model asks for hidden states.
    """
    outputs = sys.modules.get(_OUTPUTS)
    if outputs is None or not hasattr(outputs, "maybe_install_capturing_hooks"):
        return
    for module in model.modules():
        if isinstance(module, sys.modules[_MODELS].PreTrainedModel):
            outputs.maybe_install_capturing_hooks(module)


def _keep_causal_flags(stack: contextlib.ExitStack) -> None:
    masks = sys.modules.get(_MASKS)
    if masks is None:
        return  # no model that makes masks was imported
    for name, decision in _DECISIONS.items():
        if hasattr(masks, name):
            stack.enter_context(mock.patch.object(masks, name, decision))
        else:
            log.warning("%s.%s not found: causal masks will be written out as tensors", _MASKS, name)


def _scan_at_once(stack: contextlib.ExitStack, model: nn.Module) -> None:
    """Models with a selective scan call `associative_scan` while Dynamo compiles, and loop over all steps in an export;
    where their configuration asks for neither, the loop stays."""
    for name in {kind.__module__ for module in model.modules() for kind in type(module).__mro__}:
        module = sys.modules.get(name)
        scans = all(hasattr(module, asked) for asked in ("is_mambapy_available", "is_torchdynamo_exporting"))
        if name.startswith("transformers.models.") and scans:
            stack.enter_context(mock.patch.object(module, "is_torchdynamo_exporting", return_value=False))


def _let_models_make_masks(stack: contextlib.ExitStack) -> None:
    for name in _MAKE_MASKS_UNLESS_COMPILING:
        module = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
        if module is not None and hasattr(module, "is_torchdynamo_compiling"):
            stack.enter_context(mock.patch.object(module, "is_torchdynamo_compiling", return_value=False))


def _disable_cache(stack: contextlib.ExitStack, model: nn.Module) -> None:
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    for config in configs.values():
        if not isinstance(config, Tensor) and getattr(config, "use_cache", False):
            stack.enter_context(mock.patch.object(config, "use_cache", False))
