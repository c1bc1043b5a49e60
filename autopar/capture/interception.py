"""While a model is traced, attention, dropout, recurrent layers and CTC losses become our own operators, each random
call site with its own salt.

A torch function mode sees the calls of the model. `multi_head_attention_forward` calls attention and dropout
from inside torch, where no mode is active; while it runs, the two functions are replaced in its module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from autopar.capture.checkpointed_regions import Salts, recomputed_within
from autopar.capture.ctc_losses import MaskedElements, ctc_loss
from autopar.capture.embedding_bags import embedding_bag
from autopar.capture.flex import plain_flex_attention
from autopar.capture.recurrent_modules import MODES, recurrent_stack, refuse_packed

_original_attention = functional.scaled_dot_product_attention
_original_ctc_loss = functional.ctc_loss
_original_dropout = functional.dropout
_original_embedding_bag = functional.embedding_bag


class Interception(TorchFunctionMode):
    """Calls `autopar::attention` and `autopar::dropout` in place of torch's functions.

    Attention keeps torch's own formulas where ours would not fit: batch dims that differ, heads that are not grouped
    by an explicit `enable_gqa`.
    """

    def __init__(self, first_salt: int = 0) -> None:
        super().__init__()
        self._salts = Salts(first_salt)
        self._replaced = contextlib.ExitStack()

    def __enter__(self) -> Interception:
        self._replaced.enter_context(plain_flex_attention(self.attention))
        self._replaced.enter_context(recomputed_within(self._mark))
        self._replaced.enter_context(mock.patch.object(transformer, "_detect_is_causal_mask", _is_known_as_causal))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._replaced.close()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _original_attention:
            return self.attention(*args, **kwargs)
        if func is _original_embedding_bag:
            return embedding_bag(*args, **kwargs)
        if func is _original_ctc_loss:
            return ctc_loss(*args, **kwargs)
        if func in (Tensor.masked_select, torch.masked_select):
            return MaskedElements(*args, **kwargs)
        if func is _original_dropout:
            return self.dropout(*args, **kwargs)
        if func is torch.dropout:
            return self.dropout(*args, **{"training" if key == "train" else key: v for key, v in kwargs.items()})
        if func in MODES:
            return recurrent_stack(MODES[func], self.dropout, *args, **kwargs)
        if func is torch._VF._pack_padded_sequence:
            return refuse_packed()
        if func is functional.multi_head_attention_forward:
            with self._inside_functional():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`torch.nn.functional.scaled_dot_product_attention` as our operator, where it fits."""
        if query.dim() == key.dim() == value.dim() <= 3:
            mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
            q, k, v = (x.reshape(-1, 1, *x.shape[-2:]) for x in (query, key, value))
            out = self.attention(q, k, v, mask, dropout_p, is_causal, scale)
            return out.reshape(*query.shape[:-1], value.shape[-1])
        if _fits(query, key, value, attn_mask, is_causal, enable_gqa):
            salt = self._salts.take()
            out, _ = torch.ops.autopar.attention(query, key, value, attn_mask, float(dropout_p), is_causal, scale, salt)
            result: Tensor = out
            return result
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
        return self._attention_formulas(query, key, value, attn_mask, dropout_p, is_causal, scale)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """`torch.nn.functional.dropout` as our operator."""
        if not training or p == 0.0:
            return input
        out, _ = torch.ops.autopar.dropout(input, float(p), self._salts.take())
        result: Tensor = input.copy_(out) if inplace else out
        return result

    def _attention_formulas(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        return self.dropout(_softmax(scores, mask), dropout_p) @ value

    def _mark(self) -> Callable[[], Interception]:
        """The interception of a checkpointed region that runs again: it starts with the salt that comes now."""
        first = self._salts.next
        return lambda: Interception(first)

    @contextlib.contextmanager
    def _inside_functional(self) -> Iterator[None]:
        with (
            mock.patch.object(functional, "scaled_dot_product_attention", self.attention),
            mock.patch.object(functional, "dropout", self.dropout),
        ):
            yield


def _is_known_as_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """`nn.Transformer` compares its mask with a causal one, but values are not known here; a mask is always right."""
    return is_causal is True


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """In fp32 for half precision; a row that a bool mask empties gives zeros."""
    wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
    if mask is not None and mask.dtype == torch.bool:
        weights: Tensor = torch.ops.aten._safe_softmax(scores, -1, dtype=wide)
    else:
        weights = torch.softmax(scores, dim=-1, dtype=wide)
    return weights.to(scores.dtype)


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool) -> bool:
    if mask is not None and (is_causal or mask.dim() > query.dim()):
        return False
    if not query.dim() == key.dim() == value.dim() >= 4:
        return False
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-2] != value.shape[:-2]:
        return False
    return query.shape[-3] == key.shape[-3] or (enable_gqa and query.shape[-3] % key.shape[-3] == 0)
