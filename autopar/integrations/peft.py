"""PEFT: adapters of a compiled model, saved as PEFT saves them.

    model = get_peft_model(model, LoraConfig(...))
    module = autopar.compile(model, batch, optimizer=torch.optim.AdamW)
    save_adapter(module, "adapter")                # adapter_config.json and adapter_model.safetensors

Frozen weights of the base model are planned as frozen: they have no gradient and no optimizer state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autopar.errors import ConfigurationError
from autopar.integrations.absent_package import absent
from autopar.integrations.states import whole_state
from autopar.runtime.consensus import attempt_on_all
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.process_groups import rank
from autopar.runtime.weights.whole_weights import without_weights

try:
    from peft import PeftModel, set_peft_model_state_dict
    from peft.utils import load_peft_weights
except ModuleNotFoundError as error:
    raise absent("peft", "peft") from error


def save_adapter(module: ParallelModule, folder: str | Path) -> None:
    """Write the adapters of a compiled PeftModel to `folder`, as its `save_pretrained`; every rank calls it."""
    _check(module)
    state = whole_state(module)
    plain: Any = without_weights(module.original, module.training, module.absent)
    attempt_on_all(lambda: plain.save_pretrained(folder, state_dict=state) if rank() == 0 else None)


def load_adapter(module: ParallelModule, folder: str | Path, name: str = "default") -> None:
    """Read adapters that PEFT or `save_adapter` wrote into the adapter `name` of a compiled PeftModel; every rank calls
    it. The adapter must be there, with the same configuration, since it was when the model was captured."""
    _check(module)
    plain = without_weights(module.original, module.training, module.absent)
    weights = load_peft_weights(str(folder), device="cpu")
    empty = {key for key, value in plain.state_dict().items() if value.is_meta}
    set_peft_model_state_dict(plain.to_empty(device="cpu"), weights, adapter_name=name)
    taken = {key: value for key, value in plain.state_dict().items() if key in empty and _is_of(key, name)}
    module.load_state_dict(taken, strict=False)


def _is_of(key: str, name: str) -> bool:
    return f".{name}." in key or key.endswith(f".{name}")


def _check(module: ParallelModule) -> None:
    if not isinstance(module, ParallelModule) or not isinstance(module.original, PeftModel):
        raise ConfigurationError(
            f"{type(getattr(module, 'original', module)).__name__} is no compiled PeftModel: wrap the model by "
            "get_peft_model first, then pass it to autopar.compile"
        )
