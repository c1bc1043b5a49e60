"""A fused kernel over what a causal mask and a window leave: in one call, or in blocks that are joined.

    rows 4..7 of 8, causal        keys 0..3 whole, keys 4..7 causal: two calls, joined by their logsumexp
    16 rows, a window of 5        squares of 4: three that are causal in one call, beside each other in the batch; three
                                  that are turned, with rows and keys in reverse order, in another

Backward kernels, given the joined out and logsumexp, return shares of the gradients. Beside another mask a square is
its part of that mask, with the hidden pairs in it. Shapes: query (B, H, S, D), key (B, G, T, D), value (B, G, T, E),
out (B, H, S, E), logsumexp (B, H, S); mask None or added to the scores, broadcastable to (B, H, S, T).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ops.attention_blocks import KeyBlock, RowBlock, seen_blocks
from autopar.ops.attention_formulas import ScoreOptions, runs_of, scale_of
from autopar.ops.attention_kernels import FusedKernel, Scores
from autopar.ops.merge_blocks import merge_blocks


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [start, stop) and one block of keys."""

    start: int
    stop: int
    keys: KeyBlock

    @property
    def form(self) -> tuple[int, int, bool]:
        """What is equal of pieces that one call computes."""
        return self.stop - self.start, self.keys.stop - self.keys.start, self.keys.is_whole

    def rows_of(self, x: Tensor, dim: int = -2) -> Tensor:
        """Its rows, as a kernel takes and returns them."""
        return self._turned(x.narrow(dim, self.start, self.stop - self.start), dim)

    def keys_of(self, x: Tensor) -> Tensor:
        """Its keys, as a kernel takes them."""
        return self._turned(x.narrow(-2, self.keys.start, self.keys.stop - self.keys.start), -2)

    def _turned(self, x: Tensor, dim: int) -> Tensor:
        return x.flip(dim) if self.keys.is_turned else x

    def add_rows(self, total: Tensor, part: Tensor) -> None:
        """What a kernel returns for its rows, to what is there."""
        total.narrow(-2, self.start, self.stop - self.start).add_(self._turned(part, -2))

    def add_keys(self, total: Tensor, part: Tensor) -> None:
        """What a kernel returns for its keys, to what is there."""
        total.narrow(-2, self.keys.start, self.keys.stop - self.keys.start).add_(self._turned(part, -2))

    def results(self, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
        """(out, logsumexp) of a kernel in the order of the rows."""
        return self._turned(out, -2), self._turned(logsumexp, -1)


@dataclass(frozen=True, slots=True)
class FusedBlocks:
    """Attention by a fused kernel. blocks: None where no index hides a pair; batches: whether one call computes pieces
    of one form, of which a window makes many."""

    kernel: FusedKernel
    scale: float
    mask: Tensor | None
    blocks: tuple[RowBlock, ...] | None
    batches: bool

    @staticmethod
    def of(kernel: FusedKernel, query: Tensor, key: Tensor, options: ScoreOptions) -> FusedBlocks:
        """As the options say."""
        blocks = seen_blocks(*runs_of(query, key, options), options.band) if options.hides else None
        mask = _added(options.mask, query)
        batches = options.window is not None and mask is None
        return FusedBlocks(kernel, scale_of(query, options), mask, blocks, batches)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(out, logsumexp)."""
        if self.blocks is None:
            return self.kernel.forward(query, key, value, self._scores(None))
        found = dict[tuple[int, KeyBlock], tuple[Tensor, Tensor]]()
        for pieces in self._calls():
            rows = _batch([piece.rows_of(query) for piece in pieces])
            keys, values = (_batch([piece.keys_of(x) for piece in pieces]) for x in (key, value))
            results = self._forward_of(pieces[0], rows, keys, values)
            for piece, *own in zip(pieces, *(x.chunk(len(pieces)) for x in results), strict=True):
                found[piece.start, piece.keys] = piece.results(*own)
        parts = [
            _joined([found[block.start, keys] for keys in block.keys]) if block.keys else _nothing(block, query, value)
            for block in self.blocks
        ]
        if len(parts) == 1:
            return parts[0]
        outs, sums = zip(*parts, strict=True)
        return torch.cat(outs, -2), torch.cat(sums, -1)

    def _forward_of(self, piece: _Piece, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(out, logsumexp): of a row that sees nothing of the piece, zeros and -inf, whatever the kernel returns."""
        scores = self._scores(piece)
        out, logsumexp = self.kernel.forward(query, key, value, scores)
        if scores.mask is None:
            return out, logsumexp
        unseen = (scores.mask == -math.inf).all(-1)
        return out.masked_fill(unseen.unsqueeze(-1), 0.0), logsumexp.masked_fill(unseen, -math.inf)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, from the whole out and logsumexp."""
        if self.blocks is None:
            return self.kernel.backward(grad_out, query, key, value, out, logsumexp, self._scores(None))
        if self.mask is not None:  # a row that sees nothing at all: exp(-inf) = 0
            logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
        if self._is_one_call(key):
            ((piece,),) = self._calls()
            return self.kernel.backward(grad_out, query, key, value, out, logsumexp, self._scores(piece))
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        totals = [torch.zeros_like(x, dtype=wide) for x in (query, key, value)]
        for pieces in self._calls():
            grads, rows, results = (_batch([piece.rows_of(x) for piece in pieces]) for x in (grad_out, query, out))
            sums = _batch([piece.rows_of(logsumexp, -1) for piece in pieces])
            keys, values = (_batch([piece.keys_of(x) for piece in pieces]) for x in (key, value))
            found = self.kernel.backward(grads, rows, keys, values, results, sums, self._scores(pieces[0]))
            for piece, of_query, of_key, of_value in zip(pieces, *(x.chunk(len(pieces)) for x in found), strict=True):
                piece.add_rows(totals[0], of_query)
                piece.add_keys(totals[1], of_key)
                piece.add_keys(totals[2], of_value)
        return totals[0].to(query.dtype), totals[1].to(key.dtype), totals[2].to(value.dtype)

    def _calls(self) -> list[list[_Piece]]:
        """The pieces of every call."""
        found: dict[object, list[_Piece]] = {}
        for block in self.blocks or ():
            for keys in block.keys:
                piece = _Piece(block.start, block.stop, keys)
                found.setdefault(piece.form if self.batches else piece, []).append(piece)
        return list(found.values())

    def _is_one_call(self, key: Tensor) -> bool:
        """Whether one piece, in its order, is everything."""
        blocks = self.blocks or ()
        if len(blocks) != 1 or len(blocks[0].keys) != 1:
            return False
        keys = blocks[0].keys[0]
        return keys.stop - keys.start == key.shape[-2] and not keys.is_turned

    def _scores(self, piece: _Piece | None) -> Scores:
        """What a kernel adds to the scores of a piece; of everything where it is None."""
        mask = self.mask
        if piece is None:
            return Scores(scale=self.scale, mask=mask)
        if mask is None:
            return Scores(scale=self.scale, is_causal=not piece.keys.is_whole)
        rows, keys, is_whole = piece.form
        if mask.shape[-2] > 1:
            mask = piece.rows_of(mask)
        if mask.shape[-1] > 1:
            mask = piece.keys_of(mask.mT).mT
        if not is_whole:
            there = torch.ones(rows, keys, dtype=torch.bool, device=mask.device).tril()
            mask = mask.masked_fill(~there, -math.inf)
        return Scores(scale=self.scale, mask=mask)


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask in the dtype of the operands, added to the scores."""
    if mask is None:
        return None
    mask = mask if mask.dim() > 1 else mask.unsqueeze(0)
    if mask.dtype != torch.bool:
        return mask.to(query.dtype)
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _batch(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _nothing(block: RowBlock, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) of rows that see no key."""
    shape = (*query.shape[:2], block.stop - block.start)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_zeros((*shape, value.shape[-1])), query.new_full(shape, -math.inf, dtype=wide)


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) over all keys, of those over some; rounded once."""
    (out, logsumexp), *others = parts
    dtype = out.dtype
    if len(others) > 1:
        out = out.to(logsumexp.dtype)
    for other in others:
        out, logsumexp = merge_blocks(out, logsumexp, *other)
    return out.to(dtype), logsumexp
