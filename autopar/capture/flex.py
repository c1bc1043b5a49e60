"""`flex_attention` while a model is traced: a mask becomes that of `autopar::attention`, a score function formulas.

    flex_attention(q, k, v, block_mask=causal)    -->  attention(q, k, v, mask (1, 1, S, T))
    flex_attention(q, k, v, score_mod=alibi)      -->  softmax(alibi(q k^T * scale, b, h, i, j)) v

torch compiles the call to a kernel of its own, which no rule can look into. Its last step, the higher-order operator,
is replaced, so that torch's own checks of the arguments still run. Functions of positions are called once with index
tensors that broadcast; torch maps them (vmap), which export cannot follow where they read tensors of the model.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

AttentionFunction = Callable[..., Tensor]


@contextlib.contextmanager
def plain_flex_attention(attention: AttentionFunction) -> Iterator[None]:
    """While active, `flex_attention`, compiled or not, runs eagerly through `attention` and formulas.

    attention: `scaled_dot_product_attention`'s signature.
    """
    module = importlib.import_module("torch.nn.attention.flex_attention")

    def operator(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _flex_attention(module, attention, *args)

    with (
        mock.patch.object(module, "flex_attention_hop", operator),
        mock.patch.object(module, "_validate_device"),  # it refuses gradients on a CPU, where formulas have them
        mock.patch.object(module, "create_mask", _mask_of),
        mock.patch.object(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def _flex_attention(
    module: Any,
    attention: AttentionFunction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, logsumexp in base 2, largest score per row); the last two vanish from the graph where nobody reads them."""
    batch, heads = query.shape[:2]
    key, value = (x.expand(batch, *x.shape[1:]) for x in (key, value))
    mask = _mask(module, block_mask, query, key)
    scores = _scores(query, _repeat_heads(key, heads), score_mod, mask, scale)
    logsumexp = scores.logsumexp(-1)
    if score_mod is module._identity:
        out = attention(query, key, value, mask, scale=scale, enable_gqa=key.shape[1] != heads)
    else:
        weights = torch.ops.aten._safe_softmax(scores, -1).to(query.dtype)
        out = weights @ _repeat_heads(value, heads)
    return out, logsumexp / math.log(2.0), scores.amax(-1)


def _mask(module: Any, block_mask: tuple[Any, ...], query: Tensor, key: Tensor) -> Tensor | None:
    """bool (B or 1, H or 1, S, T), True = attend; None where all is seen."""
    blocks, mask_mod = block_mask[2], block_mask[-1]
    if mask_mod is module.noop_mask:
        return None
    batch, heads = blocks.shape[:2]
    return _mask_of(mask_mod, batch, heads, query.shape[-2], key.shape[-2], query.device)


def _mask_of(
    mod_fn: Callable[..., Tensor], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None
) -> Tensor:
    """What `create_mask` of torch returns for a function of positions: bool (B or 1, H or 1, S, T)."""
    shape = [1 if size is None else size for size in (B, H, Q_LEN, KV_LEN)]
    return mod_fn(*_positions(shape, torch.device("cpu" if device is None else device))).expand(shape)


def _scores(query: Tensor, key: Tensor, score_mod: Callable[..., Tensor], mask: Tensor | None, scale: float) -> Tensor:
    """(B, H, S, T) in fp32 (fp64 for fp64), -inf where masked."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query @ key.transpose(-1, -2)).to(wide) * scale
    scores = score_mod(scores, *_positions(scores.shape, query.device))
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _positions(shape: Sequence[int], device: torch.device) -> list[Tensor]:
    """The index along every dim, shaped to broadcast: functions of single positions then give whole tensors."""
    rank = len(shape)
    return [
        torch.arange(size, device=device).reshape([-1 if at == dim else 1 for at in range(rank)])
        for dim, size in enumerate(shape)
    ]


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    batch, groups, length, size = x.shape
    if groups == heads:
        return x
    return x.unsqueeze(2).expand(batch, groups, heads // groups, length, size).reshape(batch, heads, length, size)
