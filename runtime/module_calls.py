"""Module calls: the calls of a compiled module as ranks compare them (`guards/call_guard.py`).

    call, whole = calls.begin(7, leaves, spec, key)      # "train call 7 of Net", which all ranks make
    whole                                                # batch="local": the arguments at their global sizes

What has to be equal is said here: arguments, modes of submodules, frozen parameters, autocast, the Python state.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar._compat import TreeSpec
from autopar.capture import autocast_state
from autopar.runtime.collectives.progress import HERE
from autopar.runtime.guards.call_guard import CallGuard, ComparedCall
from autopar.runtime.guards.held_model import HeldModel
from autopar.runtime.guards.meetings import meet
from autopar.runtime.guards.state_of_calls import StateOfCalls
from autopar.runtime.step import batches
from autopar.runtime.step.accumulation import HeldGradients
from autopar.runtime.step.batches import BatchMode, Signature
from autopar.runtime.step.emitted_step import Step


class ModuleCalls:
    """Of `module`, whose first graph is `first`. axes: of the mesh, over which ranks share the samples; every: as of
    `CallGuard`."""

    def __init__(self, module: HeldModel, first: Step, axes: tuple[int, ...], python: StateOfCalls, every: int) -> None:
        self._module, self._first, self._axes, self._python = module, first, axes, python
        self._shard = batches.data_shard(first.groups, axes)
        self._guard = CallGuard(every, nn.Module.parameters(module))
        self._totals: dict[tuple[int, ...], list[int]] = {}

    def begin(
        self, number: int, leaves: list[Any], spec: TreeSpec, key: tuple[BatchMode, Signature]
    ) -> tuple[ComparedCall, list[Any]]:
        """The call of these arguments, compared with those of other ranks, and the arguments at their global sizes
        (as meta tensors where those are others). key: batch mode and kind of the call.

        Raises RankMismatchError and RankLostError, as `CallGuard.before_call`."""
        call = self._call(number, leaves, spec, key)
        sizes = self._guard.before_call(call)
        return call, self._at_global_sizes(call, sizes) if call.split else leaves

    def meet_before_backward(self, results: Sequence[torch.Tensor], act: str, held: HeldGradients) -> None:
        """Compare what ranks do, before the backward pass of these results runs."""
        node = next((result.grad_fn for result in results if result.grad_fn is not None), None)
        if node is not None and self._guard.is_on:
            node.register_prehook(lambda _: self._before_backward(act, held))

    def meet(self, act: str) -> None:
        """Compare that ranks are about to do `act`, as `CallGuard.before`."""
        self._guard.before(act)

    def _before_backward(self, act: str, held: HeldGradients) -> None:
        with HERE.inside("backward"):
            self._guard.before(f"the backward pass of {act}{' inside no_sync()' if held.holding else ''}")

    def _call(self, number: int, leaves: list[Any], spec: TreeSpec, key: tuple[BatchMode, Signature]) -> ComparedCall:
        trains = "train" if self._module.training else "eval"
        without = "" if torch.is_grad_enabled() else " without gradients"
        whole_key: Hashable = (*key, self._python.version())
        return ComparedCall(
            act=f"{trains} call {number} of {type(self._module.original).__name__}{without}",
            leaves=leaves,
            spec=spec,
            split=self._batch_dims(leaves) if key[0] == "local" and self._axes else {},
            shard=self._shard,
            state=self._state,
            key=whole_key,
        )

    def _batch_dims(self, leaves: list[Any]) -> dict[int, int]:
        """Leaf -> batch dim, as in the example, of the leaves that are there: labels may be missing in eval mode."""
        dims = {leaf: value.batch_dim for value, leaf in batches.input_leaves(self._first.program)}
        given = {leaf: dim for leaf, dim in dims.items() if dim is not None and leaf < len(leaves)}
        return {leaf: dim for leaf, dim in given.items() if getattr(leaves[leaf], "ndim", 0) > dim}

    def _state(self) -> Mapping[tuple[str, str], str]:
        """What decides over the graph beside the arguments, in words. Ranks of stages have other parameters each."""
        module, stages = self._module, self._first.plan.in_stages
        other_mode = [name for name, each in module.named_modules() if each.training != module.training]
        frozen = [name for name, parameter in nn.Module.named_parameters(module) if not parameter.requires_grad]
        return {
            ("has", "modules in the other mode"): ", ".join(other_mode) or "none",
            ("has", "frozen parameters"): "those of stages" if stages else ", ".join(frozen) or "none",
            ("has", "autocast"): str(autocast_state()),
            ("has", "Python state"): self._python.version(),
        }

    def _at_global_sizes(self, call: ComparedCall, sizes: tuple[int, ...]) -> list[Any]:
        """sizes: what stands for those of every rank; ranks tell each other the sizes themselves where it is new."""
        totals = self._totals.get(sizes)
        if totals is None:
            told = meet(call.sizes, f"batch sizes of {call.act}")
            totals = batches.global_sizes(told, self._axes, self._first.own_plan.layout_mesh)
            if sizes:
                self._totals[sizes] = totals
        grown = list(call.leaves)
        for (leaf, dim), total in zip(call.split.items(), totals, strict=True):
            given = grown[leaf]
            shape = list(given.shape)
            shape[dim] = total
            grown[leaf] = torch.empty(shape, dtype=given.dtype, device="meta", requires_grad=given.requires_grad)
        return grown
