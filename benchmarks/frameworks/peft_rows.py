"""Rows of PEFT: adapters in a plain loop, and in the frameworks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import torch
from torch.utils.data import default_collate

import autopar
from autopar.integrations.peft import load_adapter, save_adapter
from autopar.integrations.states import whole_state
from benchmarks.frameworks import accelerate_rows, trainer_rows
from benchmarks.frameworks.framework_models import Texts, bert, gpt2
from benchmarks.frameworks.framework_row import Run, Stand, row

STEPS = 50
TARGETS = ["c_attn", "c_proj"]


def adapted(config: Callable[[], Any], base: Callable[[], Any] = gpt2) -> Any:
    """A model with adapters, whose zeros are drawn, so that all of them have gradients."""
    torch.manual_seed(1)
    model = peft.get_peft_model(base(), config())
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model


lora = partial(adapted, partial(peft.LoraConfig, r=4, lora_alpha=8, target_modules=TARGETS))
rslora = partial(adapted, partial(peft.LoraConfig, r=4, use_rslora=True, target_modules=TARGETS))
dora = partial(adapted, partial(peft.LoraConfig, r=4, use_dora=True, target_modules=TARGETS))
with_head = partial(adapted, partial(peft.LoraConfig, r=4, target_modules=["c_attn"], modules_to_save=["ln_f"]))
biased = partial(adapted, partial(peft.LoraConfig, r=4, target_modules=["c_attn"], bias="lora_only"))
loha = partial(adapted, partial(peft.LoHaConfig, r=4, target_modules=["query", "value"]), bert)
ia3 = partial(
    adapted, partial(peft.IA3Config, target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"])
)


def batches(*, classes: bool = False) -> list[dict[str, Any]]:
    """The batches of a plain loop, whole on every rank."""
    data = Texts(8 * STEPS, classes=classes)
    return [default_collate([data[at] for at in range(begin, begin + 8)]) for begin in range(0, 8 * STEPS, 8)]


def trained(stand: Stand, *, made: Callable[[], Any] = lora, classes: bool = False, **options: Any) -> Run:
    """A plain loop."""
    model, data = made(), batches(classes=classes)
    module: Any = autopar.compile(model, data[0], optimizer=torch.optim.SGD, **options) if stand.ours else model
    losses = _steps(module, data)
    return Run(losses=losses, weights=whole_state(module) if stand.ours else dict(module.state_dict()))


def _steps(module: Any, data: list[dict[str, Any]]) -> list[float]:
    optim = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.2)
    losses = []
    for batch in data:
        loss = module(**batch).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def saved(stand: Stand, *, made: Callable[[], Any] = lora) -> Run:
    """Adapters as files, read again by PEFT alone."""
    model, data, folder = made(), batches(), stand.folder / "adapter"
    if stand.ours:
        module = autopar.compile(model, data[0], optimizer=torch.optim.SGD)
        losses = _steps(module, data)
        save_adapter(module, folder)
        torch.distributed.barrier()
    else:
        losses = _steps(model, data)
        model.save_pretrained(folder)
    read = peft.PeftModel.from_pretrained(gpt2(), str(folder))
    return Run(losses=losses, weights=dict(read.state_dict()))


def loaded(stand: Stand) -> Run:
    """Adapters of PEFT, read into a compiled model, then trained."""
    folder, data = stand.folder / "first", batches()
    first = lora()
    with torch.no_grad():
        for parameter in first.parameters():
            if parameter.requires_grad:
                parameter.mul_(3.0)
    if stand.rank == 0:
        first.save_pretrained(folder)
    torch.distributed.barrier()
    if stand.ours:
        module = autopar.compile(lora(), data[0], optimizer=torch.optim.SGD)
        load_adapter(module, folder)
        return Run(losses=_steps(module, data), weights=whole_state(module))
    return Run(losses=_steps(first, data), weights=dict(first.state_dict()))


def merged(stand: Stand) -> Run:
    """Adapters that were trained, merged into a plain model."""
    found = saved(stand)
    read = peft.PeftModel.from_pretrained(gpt2(), str(stand.folder / "adapter")).merge_and_unload()
    return Run(losses=found.losses, weights=dict(read.state_dict()))


def no_adapter(stand: Stand) -> Run:
    """A model without adapters, saved as if it had some."""
    save_adapter(autopar.compile(gpt2(), batches()[0]), stand.folder / "adapter")
    return Run()


def in_trainer(stand: Stand) -> Run:
    """Saved by the Trainer, read again by PEFT."""
    trainer = trainer_rows.trainer_of(stand, model=lora)
    trainer.train()
    trainer.save_model(str(stand.folder / "adapter"))
    trainer.accelerator.wait_for_everyone()
    read = peft.PeftModel.from_pretrained(gpt2(), str(stand.folder / "adapter"))
    return Run(losses=trainer_rows.run_of(trainer).losses, weights=dict(read.state_dict()))


ROWS = (
    row("peft", "LoRA", trained),
    row("peft", "DoRA", partial(trained, made=dora)),
    row("peft", "rsLoRA", partial(trained, made=rslora)),
    row("peft", "modules_to_save", partial(trained, made=with_head)),
    row("peft", "biases of LoRA", partial(trained, made=biased)),
    row("peft", "LoHa", partial(trained, made=loha, classes=True), refused="decides by the values of a tensor"),
    row("peft", "IA3", partial(trained, made=ia3)),
    row("peft", "LoRA, tensor parallelism", partial(trained, dims={"tp": 2}), change='dims={"tp": 2}'),
    row("peft", "DoRA, tensor parallelism", partial(trained, made=dora, dims={"tp": 2}), change='dims={"tp": 2}'),
    row("peft", "LoRA, sharded parameters", partial(trained, dims={"dp_shard": 2}), change='dims={"dp_shard": 2}'),
    row("peft", "save_adapter", saved, change='save_adapter(module, "adapter")'),
    row("peft", "save_adapter of DoRA", partial(saved, made=dora), change='save_adapter(module, "adapter")'),
    row("peft", "load_adapter", loaded, change='load_adapter(module, "adapter")'),
    row("peft", "merge_and_unload", merged, change='save_adapter(module, "adapter")'),
    row("peft", "LoRA in Accelerate", partial(accelerate_rows.trained, model=lora)),
    row("peft", "LoRA in the Trainer", in_trainer),
    row("peft", "LoRA in the Trainer, resumed", partial(trainer_rows.resumed, model=lora)),
    row("peft", "an adapter that is not there", no_adapter, refused="no compiled PeftModel"),
)  # fmt: skip
