"""Rules of attention: batch, key heads (h), queries per key head (g) and the query sequence (s) may be split.

A split of g or s leaves keys and values whole, so their gradients become Partial(sum). A split query sequence under a
causal mask, and any dropout, needs to know the global index of its rows: `attention_by_index`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.rules.call import Call

_FLOPS = "2*b*h*g*s*t*d + 2*b*h*g*s*t*e"
_FLOPS_BACKWARD = "6*b*h*g*s*t*d + 4*b*h*g*s*t*e"  # scores again, dv, dp, dq, dk


def _mask(shape: Sequence[int]) -> str:
    """A mask broadcasts from the right to (b, h g, s, t)."""
    dims = ["b", "(h g)", "s", "[t]"][4 - len(shape) :]
    return " ".join("1" if size == 1 else dim for dim, size in zip(dims, shape, strict=True))


def _mask_operand(call: Call, position: int) -> str:
    mask = call.argument("mask")
    return "" if mask is None else f", {_mask(call.operands[position].shape)}"


def _attention(call: Call) -> str:
    s = "s: by attention_by_index ; " if call.argument("is_causal") else ""
    operands = f"b (h g) s [d], b h [t] [d], b h [t] [e]{_mask_operand(call, 3)}"
    return f"{operands} -> b (h g) s [e], b (h g) s ; {s}flops: {_FLOPS}"


def _attention_backward(call: Call) -> str:
    s = "s: sum by attention_by_index ; " if call.argument("is_causal") else ""
    operands = f"b (h g) s [e], b (h g) s [d], b h [t] [d], b h [t] [e]{_mask_operand(call, 4)}"
    saved = "b (h g) s [e], b (h g) s"
    return f"{operands}, {saved} -> b (h g) s [d], b h [t] [d], b h [t] [e] ; {s}flops: {_FLOPS_BACKWARD}"


ATTENTION_RULES: Mapping[str, Callable[[Call], str | None]] = {
    "autopar.attention": _attention,
    "autopar.attention_backward": _attention_backward,
}
