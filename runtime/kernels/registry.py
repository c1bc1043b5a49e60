"""The registry: operator -> (torch reference, Triton kernel), and which of the two runs.

    autopar::rms_norm on a CPU tensor        the reference
    autopar::rms_norm on CUDA, bf16          runtime/kernels/triton_norms.py
    autopar::rms_norm on CUDA, float64       the reference: "float64 is not computed in fp32"

A kernel that does not take its arguments is never a fault: the reference computes the same on any device, and the
reason is logged once and kept (`fallbacks`). Triton is imported at the first call on CUDA, and only if it is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from autopar.ops import cross_entropy, float8, gated, grouped_products, merge_blocks, norms, packing, rope, saved_forms
from autopar.ops import indexed_attention as indexed
from autopar.ops import linear_cross_entropy as linear_loss
from autopar.ops.capability import capability
from autopar.ops.dropout_operator import dropout_rows, dropout_rows_reference
from autopar.ops.random_index import as_rows

log = logging.getLogger(__name__)
Function: TypeAlias = Callable[..., Any]
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
"""Elements of a head of attention."""
LEAST_FLOAT8 = (8, 9)
"""Compute capability from which on a device rounds to float8."""
LARGEST_INDEX = 2**31
"""Copies count their elements in 32 bits."""


class Operator(Protocol):
    """What `torch.library.custom_op` returns."""

    _name: str

    def register_kernel(self, device_types: str, /) -> Callable[[Function], Function]:
        """Decorator: the function runs where tensors are of these devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One operator and its two implementations, which take the same arguments."""

    operator: Operator
    reference: Function
    module: str
    """Of `autopar.runtime.kernels`, behind `triton_`, with the Triton implementation under the operator's name."""
    refusal: Callable[..., str | None]
    """Why the Triton kernel does not take these arguments; None where it does."""

    @property
    def name(self) -> str:
        """ "rms_norm"."""
        return self.operator._name

    def triton(self) -> Function:
        """The Triton implementation. Raises ImportError where Triton is missing."""
        found: Function = getattr(import_module(f"autopar.runtime.kernels.triton_{self.module}"), self.name)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """What runs, and why it is not Triton ("" where it is)."""

    run: Function
    reason: str = ""


def choose(kernel: Kernel, *arguments: Any) -> KernelChoice:
    """The implementation for these arguments: the reference on CPUs and wherever Triton cannot run."""
    tensor = next(argument for argument in arguments if isinstance(argument, Tensor))
    if tensor.device.type != "cuda":
        return KernelChoice(run=kernel.reference, reason=f"tensors are on {tensor.device.type}")
    if tensor.numel() == 0:
        return KernelChoice(run=kernel.reference, reason="there are no elements")
    if not has_triton():
        return KernelChoice(run=kernel.reference, reason="triton is not installed: pip install 'autopar[kernels]'")
    reason = kernel.refusal(*arguments)
    return KernelChoice(run=kernel.reference, reason=reason) if reason else KernelChoice(run=kernel.triton())


@cache
def has_triton() -> bool:
    """Whether Triton is installed; nothing is imported."""
    return find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class Registry:
    """The kernels by operator name, and why references ran on CUDA."""

    kernels: Mapping[str, Kernel]
    fallbacks: dict[str, set[str]] = field(default_factory=dict)

    def register_on_cuda(self) -> None:
        """Make every operator choose when it is called with CUDA tensors."""
        for kernel in self.kernels.values():
            kernel.operator.register_kernel("cuda")(self._chosen(kernel))

    def _chosen(self, kernel: Kernel) -> Function:
        def run(*arguments: Any) -> Any:
            choice = choose(kernel, *arguments)
            if choice.reason:
                self._note(kernel.name, choice.reason)
            tensor = next(argument for argument in arguments if isinstance(argument, Tensor))
            with torch.cuda.device(tensor.device):
                return choice.run(*arguments)

        return run

    def _note(self, name: str, reason: str) -> None:
        known = self.fallbacks.setdefault(name, set())
        if reason not in known:
            known.add(reason)
            log.warning("autopar::%s runs its torch reference: %s", name, reason)


def _refuse_rows(x: Tensor, *others: Any) -> str | None:
    """Norms: rows of supported dtypes that fit the registers of one program."""
    tensors = [x, *(other for other in others if isinstance(other, Tensor))]
    if x.shape[-1] > norms.LARGEST_ROW:
        return f"a row has {x.shape[-1]} elements, more than the {norms.LARGEST_ROW} that a program holds"
    return _refuse_dtype(*tensors)


def _refuse_dtype(*arguments: Any) -> str | None:
    dtypes = [argument.dtype for argument in arguments if isinstance(argument, Tensor)]
    foreign = next((dtype for dtype in dtypes if dtype.is_floating_point and dtype not in KERNEL_DTYPES), None)
    return None if foreign is None else f"{foreign} is not computed in fp32"


def _refuse_words(hidden: Tensor, weight: Tensor, *others: Any) -> str | None:
    return _refuse_dtype(hidden, weight, *others) if len(weight) else "the block of the vocabulary is empty"


def _refuse_gated(*arguments: Any) -> str | None:
    activation = arguments[-1]
    return _refuse_dtype(*arguments) if activation in gated.ACTIVATIONS else f"no activation {activation!r}"


def _refuse_heads(*arguments: Any) -> str | None:
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    width = max(tensors[0].shape[-1], tensors[1].shape[-1], tensors[2].shape[-1])
    if width > LARGEST_HEAD:
        return f"heads have {width} elements, more than the {LARGEST_HEAD} that a program holds"
    return _refuse_dtype(*tensors)


def _refuse_rounding(x: Tensor) -> str | None:
    if x.device.type == "cuda" and capability(x.device) < LEAST_FLOAT8:
        return f"the device has no float8 (sm_{LEAST_FLOAT8[0]}{LEAST_FLOAT8[1]} and newer have)"
    return _refuse_dtype(x)


def _refuse_copy(x: Tensor, *sizes: int) -> str | None:
    if x.numel() * 2 >= LARGEST_INDEX:  # padding at most doubles a tensor
        return f"{x.numel()} elements are counted in more than 32 bits"
    return "complex numbers and bool are copied by torch" if x.is_complex() or x.dtype == torch.bool else None


def _refuse_block(x: Tensor, bits: int, seed: Tensor, salt: int, shape: list[int], runs: list[int]) -> str | None:
    """Rounding: a block of supported dtype that is one row, or a grid of equal rows."""
    if as_rows(shape, saved_forms.nested_runs(runs)) is None:
        return "the block is no grid of equal rows"
    return _refuse_dtype(x)


def _refuse_form(kept: Tensor, *rest: Any) -> str | None:
    return _refuse_dtype(torch.empty(0, dtype=rest[-1], device="meta"))


def _table(*entries: tuple[Operator, Function, str, Callable[..., str | None]]) -> Registry:
    kernels = (Kernel(operator=o, reference=r, module=m, refusal=f) for o, r, m, f in entries)
    return Registry({kernel.name: kernel for kernel in kernels})


KERNELS = _table(
    (dropout_rows, dropout_rows_reference, "dropout", _refuse_dtype),
    (norms.rms_norm, norms.rms_norm_reference, "norms", _refuse_rows),
    (norms.add_rms_norm, norms.add_rms_norm_reference, "norms", _refuse_rows),
    (norms.rms_norm_backward, norms.rms_norm_backward_reference, "norms", _refuse_rows),
    (norms.layer_norm, norms.layer_norm_reference, "norms", _refuse_rows),
    (norms.add_layer_norm, norms.add_layer_norm_reference, "norms", _refuse_rows),
    (norms.layer_norm_backward, norms.layer_norm_backward_reference, "norms", _refuse_rows),
    (gated.gated, gated.gated_reference, "gated", _refuse_gated),
    (gated.gated_backward, gated.gated_backward_reference, "gated", _refuse_gated),
    (cross_entropy.cross_entropy, cross_entropy.cross_entropy_reference, "cross_entropy", _refuse_dtype),
    (cross_entropy.cross_entropy_rows, cross_entropy.cross_entropy_rows_reference, "cross_entropy", _refuse_dtype),
    (
        cross_entropy.cross_entropy_backward,
        cross_entropy.cross_entropy_backward_reference,
        "cross_entropy",
        _refuse_dtype,
    ),
    (
        linear_loss.linear_cross_entropy,
        linear_loss.linear_cross_entropy_reference,
        "linear_cross_entropy",
        _refuse_words,
    ),
    (
        linear_loss.linear_cross_entropy_backward,
        linear_loss.linear_cross_entropy_backward_reference,
        "linear_cross_entropy",
        _refuse_words,
    ),
    (indexed.indexed_attention, indexed.indexed_attention_reference, "attention", _refuse_heads),
    (indexed.indexed_attention_backward, indexed.indexed_attention_backward_reference, "attention", _refuse_heads),
    (grouped_products.grouped_product, grouped_products.grouped_product_reference, "grouped", _refuse_dtype),
    (grouped_products.grouped_outer, grouped_products.grouped_outer_reference, "grouped", _refuse_dtype),
    (merge_blocks.merge_blocks, merge_blocks.merge_blocks_reference, "merging", _refuse_dtype),
    (rope.rope, rope.rope_reference, "rope", _refuse_dtype),
    (rope.rope_backward, rope.rope_backward_reference, "rope", _refuse_dtype),
    (float8.quantised_rows, float8.quantised_rows_reference, "float8", _refuse_rounding),
    (float8.quantised_tensor, float8.quantised_tensor_reference, "float8", _refuse_rounding),
    (packing.pack, packing.pack_reference, "packing", _refuse_copy),
    (packing.unpack, packing.unpack_reference, "packing", _refuse_copy),
    (saved_forms.round_groups, saved_forms.round_groups_reference, "saved_forms", _refuse_block),
    (saved_forms.unround_groups, saved_forms.unround_groups_reference, "saved_forms", _refuse_form),
    (saved_forms.pack_bits, saved_forms.pack_bits_reference, "saved_forms", _refuse_dtype),
    (saved_forms.unpack_bits, saved_forms.unpack_bits_reference, "saved_forms", _refuse_form),
)
"""Every kernel of ours. AdamW is not among them: torch's own `fused=True` is one kernel on CPUs and on CUDA."""
