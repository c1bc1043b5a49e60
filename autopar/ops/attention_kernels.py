"""torch's fused attention kernels by device: forward and backward that return and take the logsumexp.

    kernel = fused_kernel(query, value, has_mask=False)           # None: there is only the formula
    out, logsumexp = kernel.forward(query, key, value, Scores(scale=0.125, is_causal=True))

    cpu     fp64, fp32, bf16, fp16    flash_attention_for_cpu
    cuda    bf16, fp16, no mask       flash_attention; on compute capability 9 and up cudnn_attention
    cuda    fp32, bf16, fp16          efficient_attention
    meta    all of these              nothing: the sizes, by which working memory is counted

Shapes: query (B, H, S, D), key (B, G, T, D), value (B, G, T, E), G dividing H; mask None or added to the scores, of
shape broadcastable to (B, H, S, T); out (B, H, S, E), logsumexp (B, H, S). Causal: S equals T. Where a kernel wants
one head size or multiples of some number, zeros are added and taken off again; where it wants as many heads of keys
as of queries, it is called for each query of a group in turn, and no key is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from autopar.ops.capability import capability

aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)
_MASK_ALIGNMENT = 16
"""Elements to which rows of a mask are aligned for the efficient kernel."""
_LOGSUMEXP_ALIGNMENT = 32
"""Rows to which the efficient kernel fills up its logsumexp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """mask: added to the scores. scale: of the products, 1 / sqrt(D) of the unpadded head size."""

    scale: float
    mask: Tensor | None = None
    is_causal: bool = False


Forward = Callable[[Tensor, Tensor, Tensor, Scores], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Scores], Sequence[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernel:
    """A kernel of torch and what it takes.

    multiple: of which head sizes must be, by size of an element in bytes; largest: head size. shares_keys: G may be
    less than H. masks: takes a mask. capability: of a CUDA device, at least.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    call: Forward
    call_backward: Backward
    multiple: Mapping[int, int]
    largest: int | None = None
    shares_keys: bool = False
    masks: bool = False
    capability: tuple[int, int] = (0, 0)

    def takes(self, query: Tensor, value: Tensor, has_mask: bool) -> bool:
        """Whether it computes attention of such operands."""
        return (
            query.dtype in self.dtypes
            and (self.masks or not has_mask)
            and (self.largest is None or self._padded(query, value) <= self.largest)
            and (query.device.type != "cuda" or capability(query.device) >= self.capability)
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """(out, logsumexp)."""
        size = self._padded(query, value)
        rows, keys, values = (_pad(x, size) for x in (query, key, value))
        if query.shape[1] == key.shape[1] or self.shares_keys:
            out, logsumexp = self.call(rows, keys, values, scores)
        else:
            groups = key.shape[1]
            parts = [
                self.call(_member(rows, groups, i), keys, values, _member_scores(scores, groups, i))
                for i in range(query.shape[1] // groups)
            ]
            out, logsumexp = (torch.stack(each, 2).flatten(1, 2) for each in zip(*parts, strict=True))
        return out[..., : value.shape[-1]], logsumexp

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of query, key and value; `out` and `logsumexp` may be of more keys than these."""
        size = self._padded(query, value)
        rows, keys = (_pad(x, size) for x in (query, key))
        grad_out, out, values = (_pad(x, size) for x in (grad_out, out, value))
        if query.shape[1] == key.shape[1] or self.shares_keys:
            grads = list(self.call_backward(grad_out, rows, keys, values, out, logsumexp, scores))
        else:
            grads = self._backward_by_member(grad_out, rows, keys, values, out, logsumexp, scores)
        return grads[0][..., : query.shape[-1]], grads[1][..., : query.shape[-1]], grads[2][..., : value.shape[-1]]

    def _backward_by_member(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        scores: Scores,
    ) -> list[Tensor]:  # fmt: skip
        groups = key.shape[1]
        of_query, of_keys = [], [torch.zeros_like(x, dtype=_wide(x.dtype)) for x in (key, value)]
        for i in range(query.shape[1] // groups):
            own = (_member(x, groups, i) for x in (grad_out, query, out, logsumexp))
            grad, rows, result, sums = own
            found = self.call_backward(grad, rows, key, value, result, sums, _member_scores(scores, groups, i))
            of_query.append(found[0])
            for total, part in zip(of_keys, found[1:], strict=True):
                total += part
        return [torch.stack(of_query, 2).flatten(1, 2), of_keys[0].to(key.dtype), of_keys[1].to(value.dtype)]

    def _padded(self, query: Tensor, value: Tensor) -> int:
        multiple = self.multiple.get(query.element_size(), 1)
        return math.ceil(max(query.shape[-1], value.shape[-1]) / multiple) * multiple


def fused_kernel(query: Tensor, value: Tensor, has_mask: bool) -> FusedKernel | None:
    """The first of the device's kernels that takes such operands; None on devices without and for other dtypes."""
    kernels = KERNELS.get(query.device.type, ())
    return next((kernel for kernel in kernels if kernel.takes(query, value, has_mask)), None)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _pad(x: Tensor, size: int) -> Tensor:
    """With a last dim of that size, dense, as kernels want it."""
    if x.shape[-1] < size:
        return functional.pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _member(x: Tensor, groups: int, i: int) -> Tensor:
    """The i-th query of every group of heads: (B, H, ...) -> (B, G, ...), a view."""
    return x[:, i :: x.shape[1] // groups]


def _member_scores(scores: Scores, groups: int, i: int) -> Scores:
    mask = scores.mask
    if mask is None or mask.dim() < 3 or mask.shape[-3] == 1:
        return scores
    return replace(scores, mask=mask[..., i :: mask.shape[-3] // groups, :, :])


def _cpu(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, scores.is_causal, attn_mask=_mask_for_cpu(scores.mask), scale=scores.scale
    )
    return out, logsumexp.reshape(query.shape[:-1])


def _cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, scores: Scores
) -> Sequence[Tensor]:
    grads: Sequence[Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, scores.is_causal,
        attn_mask=_mask_for_cpu(scores.mask), scale=scores.scale,
    )  # fmt: skip
    return grads


def _mask_for_cpu(mask: Tensor | None) -> Tensor | None:
    """Of two or of four dims."""
    return mask if mask is None or mask.dim() in (2, 4) else mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)


def _flash(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, scores.is_causal, scale=scores.scale)
    return found[0], found[1]


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, scores: Scores
) -> Sequence[Tensor]:
    unused = _no_draws(query)
    grads: Sequence[Tensor] = aten._scaled_dot_product_flash_attention_backward(
        grad_out, query, key, value, out, logsumexp.contiguous(), None, None, query.shape[2], key.shape[2], 0.0,
        scores.is_causal, unused, unused, scale=scores.scale,
    )  # fmt: skip
    return grads


def _efficient(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_efficient_attention(
        query, key, value, _bias(scores.mask, query, key), True, 0.0, scores.is_causal, scale=scores.scale
    )
    return found[0], found[1][..., : query.shape[2]]


def _efficient_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, scores: Scores
) -> Sequence[Tensor]:
    unused = _no_draws(query)
    rows = -query.shape[2] % _LOGSUMEXP_ALIGNMENT
    grads: Sequence[Tensor] = aten._scaled_dot_product_efficient_attention_backward(
        grad_out, query, key, value, _bias(scores.mask, query, key), out,
        functional.pad(logsumexp, (0, rows), value=math.inf), unused, unused, 0.0, [True, True, True, False],
        scores.is_causal, scale=scores.scale,
    )  # fmt: skip
    return grads[:3]


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask expanded to (B, H, S, T), its rows aligned; nothing is copied along the dims that it broadcasts over."""
    if mask is None:
        return None
    shape = (*query.shape[:3], key.shape[2])
    mask = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)
    if mask.shape[-1] != shape[-1]:
        mask = mask.expand(*mask.shape[:-1], shape[-1])
    padded = functional.pad(mask, (0, -shape[-1] % _MASK_ALIGNMENT)).contiguous()
    return padded[..., : shape[-1]].expand(shape)


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, scores.is_causal, scale=scores.scale
    )
    return found[0], found[1].reshape(query.shape[:-1])


def _cudnn_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, scores: Scores
) -> Sequence[Tensor]:
    unused = _no_draws(query)
    grads: Sequence[Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, query, key, value, out, logsumexp.unsqueeze(-1), unused, unused, None, None, None,
        query.shape[2], key.shape[2], 0.0, scores.is_causal, scale=scores.scale,
    )  # fmt: skip
    return grads


def _no_draws(like: Tensor) -> Tensor:
    """The state of random numbers that a kernel without dropout takes and does not read."""
    return torch.empty((), dtype=torch.int64, device=like.device)


def _nothing(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=_wide(query.dtype))


def _nothing_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, scores: Scores
) -> Sequence[Tensor]:
    return [torch.empty_like(x) for x in (query, key, value)]


_ANY: Mapping[int, int] = {}
_OF_16_BYTES: Mapping[int, int] = {2: 8, 4: 4}

KERNELS: Mapping[str, tuple[FusedKernel, ...]] = {
    "meta": (
        FusedKernel(
            name="sizes alone",
            dtypes=(torch.float64, torch.float32, *_HALVES),
            call=_nothing,
            call_backward=_nothing_backward,
            multiple=_ANY,
            shares_keys=True,
            masks=True,
        ),
    ),
    "cpu": (
        FusedKernel(
            name="flash_attention_for_cpu",
            dtypes=(torch.float64, torch.float32, *_HALVES),
            call=_cpu,
            call_backward=_cpu_backward,
            multiple=_ANY,
            masks=True,
        ),
    ),
    "cuda": (
        FusedKernel(
            name="cudnn_attention",
            dtypes=_HALVES,
            call=_cudnn,
            call_backward=_cudnn_backward,
            multiple=_OF_16_BYTES,
            largest=128,
            shares_keys=True,
            capability=(9, 0),
        ),
        FusedKernel(
            name="flash_attention",
            dtypes=_HALVES,
            call=_flash,
            call_backward=_flash_backward,
            multiple=_OF_16_BYTES,
            largest=256,
            shares_keys=True,
            capability=(8, 0),
        ),
        FusedKernel(
            name="efficient_attention",
            dtypes=(torch.float32, *_HALVES),
            call=_efficient,
            call_backward=_efficient_backward,
            multiple=_OF_16_BYTES,
            masks=True,
            capability=(5, 0),
        ),
    ),
}
"""By device type, the fastest first: on an H100 cuDNN takes 0.52 to 0.69 of the seconds of flash attention, forward and
backward (torch 2.11, cuDNN 9.19; `benchmarks/results/gpu/attention.json`)."""
