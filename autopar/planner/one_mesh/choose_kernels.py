"""Choose kernels: which kinds of groups are operators of ours in a program, by what they take and leave in memory.

    rms_norm        23.1 ms of kernels instead of 25.9                       taken
    gated           25.9 ms instead of 25.9, 4.1 GiB for backward of 5.2     taken
    gelu            25.9 ms instead of 25.9, as many bytes                   left: the backend fuses it as well

Kinds are tried one behind the other, each beside those that were taken, on the captured program: a kernel of ours is
one launch that reads its operands and writes its results once (`kernel_groups`, `KernelPrices`), and so is a chain that
the backend fuses. What is planned is the program with the kinds that were taken, so that the solver's sum, the memory
of every moment and the stages are those of the kernels that run. Our kernels are Triton's: on CPUs there is nothing to
choose. Kinds that compute twice to save memory are not tried here (`search/kernels_for_memory.py`).
"""

from __future__ import annotations

import math

import torch
from torch import fx

from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.graphs.expert_loads import OWN_ROWS
from autopar.graphs.kernel_groups import Traffic, group_reads_writes, kernel_groups
from autopar.graphs.node_values import is_backward
from autopar.graphs.operator_names import is_causal, window_of
from autopar.hardware.devices import Device
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.plans.plan_entries import FOR_MEMORY, KERNELS
from autopar.program import Program
from autopar.rules.engine import is_view

LEAST_GAIN = 1e-3
"""Share of the seconds of all kernels, or of the bytes kept for backward, that a kind must save; of the seconds it may
not cost more either. Equal prices leave the backend's kernels."""

JOINING = ("rms_norm", "layer_norm")
"""Kinds that are taken at an equal price, too: where a layout puts a collective in front of an addition, which ends the
backend's chain, their kernels take it (`join_additions`)."""
JOINING_LOSS, JOINING_FEWER = 1e-2, 0.1
"""Share of the seconds that they may cost more where they save such a share of the bytes. T5 with rms_norm: 0.8 % more
as captured and 31 % fewer bytes; planned on 8 H100 0.7 % shorter (`benchmarks.kernels_in_the_sum`)."""


def cheaper_kernels(program: Program, backend: str, device: Device) -> tuple[str, ...]:
    """The kinds of kernels that make a captured program cheaper on a device; () on CPUs."""
    if device.kind == "cpu":
        return ()
    price = _Price(backend, device)
    kinds: tuple[str, ...] = ()
    seconds, kept = price.of(program), bytes_for_backward(program)
    least, fewer = LEAST_GAIN * seconds, LEAST_GAIN * kept
    for kind in (one for one in KERNELS if one not in FOR_MEMORY):
        found = with_kernels(program, (*kinds, kind))
        if found is with_kernels(program, kinds):
            continue
        other_seconds, other_kept = price.of(found), bytes_for_backward(found)
        saves = kind in JOINING or other_seconds < seconds - least or other_kept < kept - fewer
        may_lose = JOINING_LOSS * seconds if kind in JOINING and other_kept < (1 - JOINING_FEWER) * kept else least
        if saves and other_seconds < seconds + may_lose:
            kinds, seconds, kept = (*kinds, kind), other_seconds, other_kept
    return kinds


def bytes_for_backward(program: Program) -> int:
    """Bytes that forward computes and backward reads, were nothing computed again."""
    found: dict[fx.Node, int] = {}
    for node in filter(is_backward, program.graph.nodes):
        for operand in node.all_input_nodes:
            while is_view(operand):
                operand = operand.all_input_nodes[0]
            if operand.op == "call_function" and not is_backward(operand):
                found[operand] = _bytes(operand)
    return sum(found.values())


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


class _Price:
    """Seconds of all kernels of a program; equal kernels, as of equal layers, are priced once."""

    def __init__(self, backend: str, device: Device) -> None:
        self._backend, self._prices = backend, KernelPrices(device=device)
        self._known: dict[object, float] = {}

    def of(self, program: Program) -> float:
        groups = kernel_groups(program.graph, self._backend)
        members: dict[int, list[tuple[fx.Node, Traffic]]] = {}
        for node, traffic in group_reads_writes(program.graph, groups).items():
            members.setdefault(groups[node], []).append((node, traffic))
        return math.fsum(map(self._seconds, members.values()))

    def _seconds(self, kernel: list[tuple[fx.Node, Traffic]]) -> float:
        key = tuple(
            (
                node.target, _forms(node), tuple(map(_forms, node.all_input_nodes)), tuple(map(_forms, traffic.reads)),
                traffic.writes, is_causal(node), window_of(node), node.meta.get(OWN_ROWS),
            )
            for node, traffic in kernel
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = self._prices.seconds(kernel)
        return self._known[key]


def _forms(node: fx.Node) -> object:
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple((tuple(one.shape), one.dtype) for one in values if isinstance(one, torch.Tensor))
