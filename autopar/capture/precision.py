"""Mixed precision: products in bf16 (or fp16), the parameters, their gradients and the loss in fp32.

    x = linear(x, weight)   -->   x = linear(x, weight.to(bf16))      weight: fp32, the master copy

Every floating parameter is cast once, right where the graph reads it, so a plan that stores it split gathers the bf16
cast and not the fp32 master. Autograd turns the cast around: a gradient becomes fp32 before ranks add theirs. As
under torch.autocast, losses compute in fp32; batch norms keep fp32 weights and statistics. Buffers stay as they are:
where one makes an activation wide, the next product narrows it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from autopar._compat import tree_leaves, tree_map_only
from autopar.request.precision_name import check_precision

PRECISIONS: dict[str | None, torch.dtype | None] = {
    None: None,
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Name -> dtype of the graph; None: as the model has it. Which products then run in float8 is chosen with the plan."""
REDUCED_IN: dict[str | None, torch.dtype | None] = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}
"""Name -> dtype in which gradients are added over ranks; None: that of their operators."""

WIDE_FUNCTIONS = frozenset(
    {
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
        functional.cosine_embedding_loss,
        functional.cross_entropy,
        functional.ctc_loss,
        functional.gaussian_nll_loss,
        functional.hinge_embedding_loss,
        functional.huber_loss,
        functional.kl_div,
        functional.l1_loss,
        functional.log_softmax,
        functional.mse_loss,
        functional.nll_loss,
        functional.poisson_nll_loss,
        functional.smooth_l1_loss,
        functional.soft_margin_loss,
        functional.triplet_margin_loss,
        torch.log_softmax,
        Tensor.log_softmax,
    }
)
"""Losses and their logarithms: a mean over many tokens needs more digits than bf16 has."""

NARROW_FUNCTIONS = frozenset(
    {
        functional.bilinear,
        functional.conv1d,
        functional.conv2d,
        functional.conv3d,
        functional.conv_transpose1d,
        functional.conv_transpose2d,
        functional.conv_transpose3d,
        functional.group_norm,
        functional.layer_norm,
        functional.linear,
        functional.multi_head_attention_forward,
        functional.rms_norm,
        functional.scaled_dot_product_attention,
        torch.addmm,
        torch.baddbmm,
        torch.bmm,
        torch.einsum,
        torch.matmul,
        torch.mm,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.bmm,
        Tensor.matmul,
        Tensor.mm,
    }
)
"""Functions that want one dtype for all operands: a wide one beside a narrow one is narrowed."""


def precision_dtype(precision: str | None) -> torch.dtype | None:
    """Dtype in which products run; None: as the model has it. Raises ConfigurationError for unknown names."""
    check_precision(precision)
    return PRECISIONS[precision]


def canonical_names(model: nn.Module) -> dict[str, str]:
    """The first name of each tied parameter or buffer, by any of its names."""
    first: dict[int, str] = {}
    names = {}
    for named in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            names[name] = first.setdefault(id(tensor), name)
    return names


def narrowed(value: Any, dtype: torch.dtype | None) -> Any:
    """Every wider floating tensor in a pytree cast to `dtype`; the rest as it is."""
    if dtype is None:
        return value
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if _is_wider(tensor, dtype) else tensor, value)


def widened(value: Any) -> Any:
    """Every half-precision tensor in a pytree cast to fp32; the rest as it is."""
    return tree_map_only(Tensor, lambda tensor: tensor.float() if _is_half(tensor) else tensor, value)


@contextlib.contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype | None, canonical: Mapping[str, str]) -> Iterator[None]:
    """Within the context `model` computes in `dtype` from casts of its parameters; None changes nothing.

    canonical: the first name of each tied parameter by any of its names; tied parameters share one cast.
    """
    if dtype is None:
        yield
        return
    with _cast_parameters(model, dtype, canonical), _MixedPrecision(dtype):
        yield


@contextlib.contextmanager
def _cast_parameters(model: nn.Module, dtype: torch.dtype, canonical: Mapping[str, str]) -> Iterator[None]:
    casts: dict[str, Tensor] = {}
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for path, module in model.named_modules():
            if isinstance(module, _NormBase):
                continue
            saved.append((module._parameters, dict(module._parameters)))
            own = {}
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    full_name = f"{path}.{name}" if path else name
                    full_name = canonical.get(full_name, full_name)
                    if full_name not in casts:
                        casts[full_name] = narrowed(parameter, dtype)
                    own[name] = casts[full_name]
            module._parameters.update(own)
            if isinstance(module, nn.RNNBase):  # it keeps a second list of its weights
                saved.append((module.__dict__, {"_flat_weights": module._flat_weights}))
                module.__dict__["_flat_weights"] = [own[name] for name in module._flat_weights_names]
        yield
    finally:
        for tensors, original in saved:
            tensors.update(original)


class _MixedPrecision(TorchFunctionMode):
    """Losses get fp32 operands; products of a wide and a narrow operand get narrow ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in WIDE_FUNCTIONS:
            args, kwargs = widened((args, kwargs))
        elif func in NARROW_FUNCTIONS and _has_half((args, kwargs)):
            args, kwargs = narrowed((args, kwargs), self._dtype)
        return func(*args, **kwargs)


def _has_half(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and _is_half(leaf) for leaf in tree_leaves(value))


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _is_wider(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > dtype.itemsize
