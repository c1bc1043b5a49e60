"""Values of a call: what the graph of a step takes from the module and the arguments, and what comes of its results.

states = graph_states(module, step, seed)             # parameters, buffers, the seed: once per call
values = graph_inputs(step, leaves, states, ())       # beside this rank's blocks of the arguments: once per part
write_buffers(module, step, results)
output = user_output(step, results, handing)          # plain, or read when the user looks (`handed_outputs.py`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import ConfigurationError
from autopar.program import Constant, Input
from autopar.runtime.parameters import local_tensor
from autopar.runtime.step import batches
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.step.handed_outputs import Handed, hand_out


def graph_states(module: nn.Module, step: Step, seed: int) -> dict[str, torch.Tensor]:
    """The value of every input of the lowered graph that is no argument, by name: parameters as DTensors, this rank's
    blocks of buffers, and the seed."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    states: dict[str, torch.Tensor] = {}
    for value in step.lowered.inputs:
        if value.role == "parameter":
            states[value.name] = parameters[value.name]
        elif value.role == "buffer":
            states[value.name] = local_tensor(module.get_buffer(value.name)).detach()
        elif value.role == "seed":
            states[value.name] = torch.full(value.shape, seed, dtype=value.dtype, device=step.groups.device)
    return states


def graph_inputs(
    step: Step, leaves: Sequence[Any], states: Mapping[str, torch.Tensor], split_axes: Sequence[int]
) -> list[torch.Tensor]:
    """The values of `step.bound_inputs`.

    leaves: of the arguments, of the batch or of one part of it. split_axes: the mesh axes over which each rank passes
    its own part of them; none where every rank passes the same.
    """
    leaf_of = {value.name: leaf for value, leaf in batches.input_leaves(step.program)}
    return [
        _argument_block(step, value, leaves[leaf_of[value.name]], split_axes)
        if value.role == "input"
        else states[value.name]
        for value in step.bound_inputs
    ]


def _argument_block(step: Step, value: Input, argument: torch.Tensor, split_axes: Sequence[int]) -> torch.Tensor:
    layout = batches.input_layout(step.own_plan, value.name)
    tensor = argument.to(step.groups.device)
    if not split_axes:
        return batches.keep_block(tensor, layout, step.groups)
    whole = next(entry for entry in step.program.inputs if entry.role == "input" and entry.name == value.name)
    passed = batches.data_layout(whole.batch_dim, split_axes, len(layout))
    return batches.exchange_block(tensor, whole.shape, passed, layout, step.groups)


def write_buffers(module: nn.Module, step: Step, results: Sequence[torch.Tensor]) -> None:
    """Buffers take their new values; the old ones stay alive for backward, so nothing is copied in place."""
    names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for value, output in zip(results, step.forward_outputs, strict=True):
        if output.role != "mutation":
            continue
        if output.name not in names:
            raise ConfigurationError(f"the model changes {output.name} in place; only buffers may be changed")
        buffer = module.get_buffer(output.name)
        if isinstance(buffer, DTensor):
            buffer._local_tensor = value
        else:
            buffer.data = value


@dataclass(frozen=True, slots=True, kw_only=True)
class Handing:
    """How a call hands out what it returns. act: its name, for messages; gathers: every output whole, at once; axes:
    over which each rank wants its own rows (none: the whole batch); batch_dims: output -> the dim of its rows."""

    act: str
    gathers: bool = False
    axes: Sequence[int] = ()
    batch_dims: Mapping[str, int] = field(default_factory=dict)


def user_output(step: Step, results: Sequence[torch.Tensor], handing: Handing) -> Any:
    """What the model returned, in its structure: plain tensors, or `LazyOutput`s of what lies across ranks."""
    leaves = [
        leaf.value if isinstance(leaf, Constant) else _returned_tensor(step, results, leaf, handing)
        for leaf in step.program.output_leaves
    ]
    return step.program.out_spec.unflatten(leaves)


def _returned_tensor(step: Step, results: Sequence[torch.Tensor], index: int, handing: Handing) -> torch.Tensor:
    output = step.program.outputs[index]
    shape = step.whole.returned[index].meta["val"].shape
    if not shape:
        return results[index]
    held = batches.output_layout(step.own_plan, output.name)
    handed = Handed(
        what=f"the output {output.name} of {handing.act}",
        shape=tuple(shape),
        held=held,
        wanted=batches.data_layout(handing.batch_dims.get(output.name), handing.axes, len(held)),
        groups=step.groups,
    )
    return hand_out(results[index], handed, gathers=handing.gathers)
