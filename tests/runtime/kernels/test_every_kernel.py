"""Every operator of ours that a program may hold has a price and a kernel, and runs on fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import autopar.runtime.kernels  # noqa: F401 (registers the kernels)
from autopar._compat import tree_leaves, tree_map
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.graphs.kernel_groups import group_reads_writes, kernel_groups
from autopar.hardware.cluster import Cluster
from autopar.rules.engine import TABLE
from autopar.runtime.kernels.registry import KERNELS
from benchmarks.fake_cuda.tensors import fake_cuda
from benchmarks.kernels import attention_calls, calls, grouped_calls, loss_calls

GPU = Cluster.parse("1 H100-SXM").device
OTHERS = {
    "attention": "calls torch's kernels, or indexed_attention",
    "attention_backward": "as attention",
    "attention_backward_with_mask": "as attention",
    "ctc_loss": "torch's own",
    "ctc_loss_backward": "torch's own",
    "dropout": "dropout_rows, or torch's",
    "dropout_backward": "a product of torch",
    "expert_linear": "torch's grouped product, or grouped_product",
    "expert_outer": "torch's grouped product, or grouped_outer",
    "exponential": "written in torch",
    "integers": "written in torch",
    "linear_recurrence": "written in torch, in chunks of steps",
    "mm_fp8_rowwise": "quantised_rows, and torch's product",
    "mm_fp8_tensorwise": "quantised_tensor, and torch's product",
    "normal": "written in torch",
    "reverse_cumsum": "flips and torch's cumsum",
    "recurrent_layer": "torch's own",
    "recurrent_layer_backward": "torch's own",
    "ring_attention": "as attention, for every block of keys",
    "ring_attention_backward": "as ring_attention",
    "tiled_mlp": "products of torch, and gated",
    "tiled_mlp_backward": "products of torch, and gated_backward",
    "uniform": "written in torch",
}
"""Operators of ours without a kernel of their own -> what runs."""


ON_A_RANK = {
    "add_rms_norm", "add_layer_norm", "cross_entropy_rows", "dropout_rows", "grouped_product", "grouped_outer",
    "indexed_attention", "indexed_attention_backward", "merge_blocks", "pack", "pack_bits", "quantised_rows",
    "quantised_tensor", "round_groups", "unpack", "unpack_bits", "unround_groups",
}  # fmt: skip
"""Kernels that are put in when a program is lowered, or that another operator calls: they need no rule."""
CALLS: dict[str, tuple[Any, ...]] = {
    **dict(calls(8, 128, "cpu")),
    **{name: arguments for name, arguments, _ in loss_calls(8, 32, 16, "cpu")},
    **{name: arguments for name, arguments, _ in grouped_calls(8, 2, 16, 16, "cpu")},
    **dict(attention_calls(1, 2, 16, 16, "cpu")),
}


def without_kernel(ruled: Collection[str], kernels: Collection[str]) -> set[str]:
    """Operators of ours that a captured program may hold and of which nothing says what runs."""
    return {*ruled} - {*kernels} - {*OTHERS}


def test_every_operator_that_programs_hold_has_a_kernel_or_says_what_runs() -> None:
    ruled = {key.removeprefix("autopar.") for key in TABLE if key.startswith("autopar.")}
    assert without_kernel(ruled, KERNELS.kernels) == set()
    assert {*OTHERS} <= ruled
    assert {*KERNELS.kernels} - ruled == ON_A_RANK
    assert without_kernel({*ruled, "novelty"}, KERNELS.kernels) == {"novelty"}


def test_every_kernel_has_a_call() -> None:
    assert CALLS.keys() == KERNELS.kernels.keys()


def on_fake_cuda(name: str) -> list[Tensor]:
    with fake_cuda():
        arguments = tree_map(
            lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x, CALLS[name]
        )
        found = getattr(torch.ops.autopar, name)(*arguments)
    return [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.parametrize("name", sorted(KERNELS.kernels))
def test_every_kernel_runs_on_fake_cuda_tensors(name: str) -> None:
    wanted = KERNELS.kernels[name].reference(*CALLS[name])
    found, wanted = on_fake_cuda(name), [wanted] if isinstance(wanted, Tensor) else list(wanted)
    assert {x.device.type for x in found} == {"cuda"}
    forms = [(x.shape, x.dtype) for x in wanted if isinstance(x, Tensor)]
    assert [(x.shape, x.dtype) for x in found if isinstance(x, Tensor)] == forms


def priced(name: str, backend: str) -> tuple[int, float]:
    """(kernels, seconds) of a call on its own."""
    graph = fx.Graph()
    arguments = []
    for index, value in enumerate(CALLS[name]):
        if isinstance(value, Tensor):
            node = graph.placeholder(f"x{index}")
            node.meta["val"] = value.to("meta")
            value = node
        arguments.append(value)
    target = getattr(torch.ops.autopar, name).default
    call = graph.call_function(target, tuple(arguments))
    call.meta["val"] = target(*[a.meta["val"] if isinstance(a, fx.Node) else a for a in arguments])
    graph.output(call)
    groups = kernel_groups(graph, backend)
    traffic = group_reads_writes(graph, groups)
    return len(set(groups.values())), KernelPrices(device=GPU).seconds(list(traffic.items()))


@pytest.mark.parametrize("name", sorted(KERNELS.kernels))
def test_every_kernel_has_a_price(name: str) -> None:
    count, seconds = priced(name, "inductor")
    assert count == 1
    moved = sum(x.numel() * x.element_size() for x in tree_leaves(CALLS[name]) if isinstance(x, Tensor))
    assert seconds > moved / GPU.memory_bytes_per_second
