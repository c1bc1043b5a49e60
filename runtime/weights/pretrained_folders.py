"""Pretrained folders: what a model of transformers writes into its folder beside the weights.

    if is_saved_as_it_is(model):
        save_all_but_weights(model, folder)     # config.json, generation_config.json, the code of custom models

Its own `save_pretrained` writes them, without a state. Models whose tensors it converts when it writes (experts,
quantized weights, adapters) need all of them at once, so they are not for this way. transformers is not imported: a
model made of it has done so.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

from torch import nn

_CONVERSIONS = "transformers.conversion_mapping"


def is_saved_as_it_is(model: nn.Module) -> bool:
    """Whether it is a model of transformers that is written under the names and in the shapes that it has."""
    classes = {f"{each.__module__}.{each.__qualname__}" for each in type(model).__mro__}
    if "transformers.modeling_utils.PreTrainedModel" not in classes:
        return False
    changed = ("hf_quantizer", "_hf_peft_config_loaded", "_keys_to_ignore_on_save")
    if any(getattr(model, name, None) for name in changed):
        return False
    conversions = getattr(sys.modules.get(_CONVERSIONS), "get_model_conversion_mapping", None)
    return conversions is not None and not conversions(model, add_legacy=False)


def save_all_but_weights(model: nn.Module, folder: Path) -> None:
    """What `save_pretrained` writes beside weights. It notes dtype and class in the configuration: in a copy."""
    shown: Any = copy.copy(model)
    shown.config = copy.deepcopy(shown.config)
    shown.save_pretrained(folder, state_dict={}, save_original_format=False)
