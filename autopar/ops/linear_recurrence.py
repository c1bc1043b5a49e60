"""A first-order linear recurrence along a dim as one operator: the selective scan of Mamba, RG-LRU, gated sums.

    h = linear_recurrence(a, b, dim, False)      h[t] = a[t] * h[t - 1] + b[t], from h[-1] = 0
    h = linear_recurrence(a, b, dim, True)       h[t] = a[t] * h[t + 1] + b[t], from the end

Written step by step it is a dozen nodes per step, in which no rank can begin before the one in front of it has ended.
As one operator a block is run from 0, and what stands before it is added behind: the product of a over a prefix of the
block times the state in front of the block (Blelloch, Prefix sums and their applications, 1990, 1.4).

    h, p = block_recurrence(a, b, dim, reverse)     p: products of a up to each place of the block
    s = last_of_block(h, p, dim, position, n); all_reduce; h + p * carried(s)[position]

Its gradient is the recurrence in the other direction with a moved by one place, so that it is split likewise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64
"""Steps that are taken one by one, in all chunks of a sequence at once."""


def block_recurrence(decay: Tensor, added: Tensor, dim: int, reverse: bool) -> tuple[Tensor, Tensor]:
    """(states, products of `decay`) of a block that starts from nothing, in fp32 (fp64 for fp64)."""
    a, b = (_wide(x).movedim(dim, 0) for x in (decay, added))
    if reverse:
        a, b = a.flip(0), b.flip(0)
    length = a.shape[0]
    chunk = min(CHUNK, max(1, length))
    missing = -length % chunk
    if missing:
        widths = (0, 0) * (a.dim() - 1) + (0, missing)
        a, b = functional.pad(a, widths), functional.pad(b, widths)
    a, b = (x.reshape(-1, chunk, *x.shape[1:]) for x in (a, b))  # (chunks, steps, ...)
    products, states = torch.empty_like(a), torch.empty_like(b)
    product, state = torch.ones_like(a[:, 0]), torch.zeros_like(b[:, 0])
    for step in range(chunk):
        product, state = a[:, step] * product, a[:, step] * state + b[:, step]
        products[:, step], states[:, step] = product, state
    for at in range(1, a.shape[0]):  # each chunk goes on from the last place of the one in front of it
        states[at] += products[at] * states[at - 1, -1]
        products[at] *= products[at - 1, -1]
    results = (x.flatten(0, 1)[:length] for x in (states, products))
    states, products = (x.flip(0) if reverse else x for x in results)
    return states.movedim(0, dim), products.movedim(0, dim)


def last_of_block(
    states: Tensor, products: Tensor, dim: int, position: int, num_blocks: int, reverse: bool
) -> Tensor:
    """(num_blocks, 2, ...): what a block passes on (product of its decays, its state) in its own slot, else zeros."""
    last = 0 if reverse else states.shape[dim] - 1
    slots = states.new_zeros((num_blocks, 2, *states.select(dim, last).shape))
    slots[position, 0], slots[position, 1] = products.select(dim, last), states.select(dim, last)
    return slots


def carried_on(
    states: Tensor, products: Tensor, dim: int, passed: Tensor, position: int, dtype: torch.dtype
) -> Tensor:
    """States of a block in `dtype`, behind the blocks in front of it; passed: `last_of_block` of all blocks."""
    before = torch.zeros_like(passed[0, 1])
    for decay, state in passed[:position]:
        before = decay * before + state
    return (states + products * before.unsqueeze(dim)).to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@torch.library.custom_op(
    "autopar::linear_recurrence",
    mutates_args=(),
    schema="(Tensor decay, Tensor added, int dim, bool reverse) -> Tensor",
)
def linear_recurrence(decay: Tensor, added: Tensor, dim: int, reverse: bool) -> Tensor:
    """The states, of the shape and dtype of `added`; `decay` has the same shape."""
    return block_recurrence(decay, added, dim, reverse)[0].to(added.dtype).contiguous()


@linear_recurrence.register_fake
def _(decay: Tensor, added: Tensor, dim: int, reverse: bool) -> Tensor:
    return added.new_empty(added.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    decay, _, ctx.dim, ctx.reverse = inputs
    ctx.save_for_backward(decay, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    """g[t] = grad[t] + a[t + 1] * g[t + 1] is the gradient of b, g[t] * h[t - 1] that of a."""
    decay, states = ctx.saved_tensors
    back = 1 if ctx.reverse else -1
    found = linear_recurrence(_moved(decay, ctx.dim, back), grad, ctx.dim, not ctx.reverse)
    return (found * _moved(states, ctx.dim, -back)).to(decay.dtype), found, None, None


def _moved(x: Tensor, dim: int, by: int) -> Tensor:
    """x moved `by` places towards the end of `dim`, with zeros where nothing comes from."""
    return functional.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (by, -by))


linear_recurrence.register_autograd(_backward, setup_context=_save)
