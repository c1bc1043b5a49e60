"""Identities: which values of a checkpoint are which values of a run, compared before any is read.

    model.layers.2.weight            float32 [8, 8] in the checkpoint, nothing here
    optimizer.groups.head.weight     in group 0 of the checkpoint, in group 1 here

Names, global shapes and dtypes are compared both ways. Optimizer state may be absent for some parameters: those that
had no gradient before the save. The state of a parameter is taken whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from autopar.errors import ConfigurationError
from autopar.runtime.checkpoints.manifest import Manifest, TensorForm
from autopar.runtime.checkpoints.tensor_files import State
from autopar.runtime.checkpoints.training_state import (
    EXTRA,
    GROUPS,
    MODEL,
    OPTIMIZER,
    STATE,
    form_of,
    group_names,
    state_entry,
)
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.parameters import unique_parameters

Forms = Mapping[str, TensorForm | None]
"""Name -> form of a tensor, None for what is none."""
_SHOWN = 8


def saved_forms(index: Metadata) -> dict[str, TensorForm | None]:
    """What the files of tensors hold."""
    return {
        name: TensorForm(shape=tuple(entry.size), dtype=str(entry.properties.dtype).removeprefix("torch."))
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in index.state_dict_metadata.items()
    }


def differences(
    saved: Forms,
    manifest: Manifest | None,
    state: State,
    module: ParallelModule,
    optimizer: torch.optim.Optimizer | None,
    extra: Iterable[str],
) -> dict[str, str]:
    """Name -> how the checkpoint and this rank differ there. manifest: None where the checkpoint has none."""
    found = _differing(_part(saved, MODEL), _part({n: form_of(v) for n, v in state.items()}, MODEL) | _absent(module))
    found |= {EXTRA + name: "nothing in the checkpoint" for name in extra if EXTRA + name not in saved}
    if optimizer is not None:
        found |= _optimizer_differences(saved, manifest, state, module, optimizer)
    return found


def refuse(folder: Path, found: Mapping[str, str]) -> None:
    """Raises ConfigurationError where there are differences."""
    if found:
        shown = "; ".join(f"{name}: {difference}" for name, difference in list(found.items())[:_SHOWN])
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigurationError(
            f"cannot load a checkpoint of this model from {folder}, nothing was changed: {len(found)} values differ "
            f"({shown}{more}): load what was saved of such a model and optimizer, or pass strict=False for what agrees"
        )


def agreeing(
    saved: Forms, state: State, module: ParallelModule, with_optimizer: bool, left_out: Iterable[str]
) -> dict[str, TensorForm | None]:
    """What this rank reads: what it has a place for, without what differs on any rank."""
    left, owners, differing = set(left_out), _first_names(module), differing_parameters(module, left_out)
    groups_agree = not any(name.startswith(GROUPS.rstrip(".")) for name in left)

    def is_read(name: str) -> bool:
        if name.startswith(STATE):
            owner = _owner(name, owners)
            return with_optimizer and OPTIMIZER not in left and owner is not None and owner not in differing
        if name.startswith(GROUPS):
            return with_optimizer and OPTIMIZER not in left and groups_agree
        return name not in left and (name in state or name.startswith(EXTRA))

    return {name: form for name, form in saved.items() if is_read(name)}


def differing_parameters(module: ParallelModule, left_out: Iterable[str]) -> set[str]:
    """First names of the parameters here whose value or state is left out."""
    owners = _first_names(module)
    return {owner for name in left_out if (owner := _owner(name, owners)) is not None}


def _first_names(module: ParallelModule) -> dict[str, str]:
    """Every name of a parameter -> the first one."""
    return {name: aliases[0] for _, aliases in unique_parameters(module).values() for name in aliases}


def _owner(name: str, owners: Mapping[str, str]) -> str | None:
    """The parameter whose value or state has this name, where this rank has it."""
    entry = state_entry(name)
    return owners.get(name.removeprefix(MODEL) if entry is None else entry[0])


def _part(forms: Forms, prefix: str) -> dict[str, TensorForm | None]:
    return {name: form for name, form in forms.items() if name.startswith(prefix)}


def _absent(module: ParallelModule) -> dict[str, TensorForm | None]:
    """Parameters that only ranks of other stages hold."""
    return {MODEL + name: form_of(parameter) for name, parameter in module.absent.items()}


def _differing(saved: Forms, here: Forms) -> dict[str, str]:
    return {
        name: f"{_described(saved, name)} in the checkpoint, {_described(here, name)} here"
        for name in sorted(saved.keys() | here.keys())
        if name not in saved or name not in here or saved[name] != here[name]
    }


def _described(forms: Forms, name: str) -> str:
    return "nothing" if name not in forms else str(forms[name] or "no tensor")


def _optimizer_differences(
    saved: Forms, manifest: Manifest | None, state: State, module: ParallelModule, optimizer: torch.optim.Optimizer
) -> dict[str, str]:
    kind = type(optimizer).__name__
    if not _part(saved, GROUPS):
        return {OPTIMIZER: f"nothing in the checkpoint, {kind} here"}
    if manifest is not None and manifest.optimizer != kind:
        return {OPTIMIZER: f"{manifest.optimizer} in the checkpoint, {kind} here"}
    places = {name: f"in group {index}" for index, names in enumerate(group_names(module, optimizer)) for name in names}
    found = _group_differences(places, saved, manifest, module, optimizer)
    owners = _first_names(module)
    for name in _part(saved, STATE):
        parameter = (state_entry(name) or ("", ""))[0]
        if parameter in module.absent:
            continue
        if owners.get(parameter) not in places:
            found[name] = f"{_described(saved, name)} in the checkpoint, {parameter} is not in the optimizer here"
        elif name in state and form_of(state[name]) != saved[name]:
            found[name] = f"{_described(saved, name)} in the checkpoint, {form_of(state[name]) or 'no tensor'} here"
    return found


def _group_differences(
    places: Mapping[str, str],
    saved: Forms,
    manifest: Manifest | None,
    module: ParallelModule,
    optimizer: torch.optim.Optimizer,
) -> dict[str, str]:
    """By parameter, which group it is in; and how many groups there are."""
    there, here = len({name.split(".")[2] for name in _part(saved, GROUPS)}), len(optimizer.param_groups)
    found = {GROUPS.rstrip("."): f"{there} groups in the checkpoint, {here} here"} if there != here else {}
    if manifest is not None:
        owners = _first_names(module)
        before = {
            owners.get(name, name): f"in group {index}"
            for index, names in enumerate(manifest.groups)
            for name in names
            if name not in module.absent
        }
        for name in sorted(name for name in before.keys() | places.keys() if before.get(name) != places.get(name)):
            was, is_now = before.get(name, "in no group"), places.get(name, "in no group")
            found[GROUPS + name] = f"{was} in the checkpoint, {is_now} here"
    return found
