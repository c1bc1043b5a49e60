"""Rules of attention: batch dims, key heads (h), queries per key head (g) and the query sequence (s) may be split.

    b (h g) s [d], b h [t] [d], b h [t] [e] -> b (h g) s [e], b (h g) s

A split of g or s leaves keys and values whole, so their gradients become Partial(sum); the gradient of a mask is one
along every dim that it broadcasts. A split query sequence under a causal mask or a window, and any dropout, needs to
know the global index of its rows: `attention_by_index`. `autopar::ring_attention` is the same operator with one
sequence for queries, keys and values: a split of s cuts them all, and blocks of keys and values go around. Models reach
`autopar::attention`; torch's own kernels, which appear where a model calls them by name, share the same string, with
the causal sequence whole and no rule when they draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.rules.call import Call, TensorSpec


def _batch(shape: Sequence[int]) -> list[str]:
    """Names of the dims before (heads, sequence, size)."""
    count = len(shape) - 3
    return ["b"] if count == 1 else [f"b{i}" for i in range(count)]


def _mask(shape: Sequence[int], query: Sequence[int]) -> str:
    """A mask broadcasts from the right to (..., h g, s, t)."""
    dims = [*_batch(query), "(h g)", "s", "[t]"][len(query) - len(shape) :]
    return " ".join("1" if size == 1 else dim for dim, size in zip(dims, shape, strict=True))


def _tensors(query: Sequence[int], s: str = "s", t: str = "[t]") -> dict[str, str]:
    """The dims of every tensor by its letter: q, k, v, o (out) and l (logsumexp)."""
    b = " ".join(_batch(query))
    return {
        "q": f"{b} (h g) {s} [d]",
        "k": f"{b} h {t} [d]",
        "v": f"{b} h {t} [e]",
        "o": f"{b} (h g) {s} [e]",
        "l": f"{b} (h g) {s}",
    }


def _hides(call: Call) -> bool:
    """Whether global indices hide pairs."""
    return call.argument("is_causal") or call.argument("window") is not None


def _flops(call: Call, backward: bool, keys: str = "t") -> str:
    """A causal mask is not counted, a window is: the keys that a row sees."""
    query, length = call.argument("query").shape, call.argument("key").shape[-2]
    window = call.argument("window")
    if window is not None:
        keys = str(min(length, window if call.argument("is_causal") else 2 * window - 1))
    return _formula(query, backward, keys)


def _formula(query: Sequence[int], backward: bool, keys: str) -> str:
    pairs = "*".join([*_batch(query), "h", "g", "s", keys])
    # backward: scores again, dq and dk over d; dv and dp over e
    return f"6*{pairs}*d + 4*{pairs}*e" if backward else f"2*{pairs}*d + 2*{pairs}*e"


def _attention(call: Call) -> str:
    query = call.operands[0].shape
    mask = "" if call.argument("mask") is None else f", {_mask(call.operands[3].shape, query)}"
    s = "s: by attention_by_index ; " if _hides(call) else ""
    t = _tensors(query)
    return f"{t['q']}, {t['k']}, {t['v']}{mask} -> {t['o']}, {t['l']} ; {s}flops: {_flops(call, False)}"


def _attention_backward(call: Call) -> str:
    query = call.operands[1].shape
    mask = "" if call.argument("mask") is None else f", {_mask(call.operands[4].shape, query)}"
    s = "s: sum by attention_by_index ; " if _hides(call) else ""
    t = _tensors(query)
    operands = f"{t['o']}, {t['q']}, {t['k']}, {t['v']}{mask}, {t['o']}, {t['l']}"
    grad_mask = mask if len(call.outputs) == 4 else ""
    return f"{operands} -> {t['q']}, {t['k']}, {t['v']}{grad_mask} ; {s}flops: {_flops(call, True)}"


def _ring(call: Call) -> str:
    query = call.operands[0].shape
    mask = "" if call.argument("mask") is None else f", {_mask(call.operands[3].shape, query)}"
    t = _tensors(query, t="s")
    own = call.operands[1].dtype.itemsize
    # a block is read, and what was found so far is read and written
    joins = f"{own + 2 * _wide(own)}*{_rows(query)}*h*g*s*e"
    s = f"s: by ring_attention ring {_blocks(query, own)} joins {joins}{_band(call)}"
    return f"{t['q']}, {t['k']}, {t['v']}{mask} -> {t['o']}, {t['l']} ; {s} ; flops: {_flops(call, False, 's')}"


def _ring_backward(call: Call) -> str:
    """Gradients of keys and values are summed in fp32 (fp64) on their way around."""
    query, key = call.operands[1].shape, call.operands[2]
    mask = "" if call.argument("mask") is None else f", {_mask(call.operands[4].shape, query)}"
    t = _tensors(query, t="s")
    own = key.dtype.itemsize
    wide = _wide(own)
    # gradients of keys and values are packed into a message, too
    joins = f"{own + 2 * wide}*{_rows(query)}*h*g*s*d+{_blocks(query, own + 4 * wide)}"
    s = f"s: by ring_attention_backward ring {_blocks(query, own)} home {_blocks(query, wide)} joins {joins}"
    s += _band(call)
    operands = f"{t['o']}, {t['q']}, {t['k']}, {t['v']}{mask}, {t['o']}, {t['l']}"
    return f"{operands} -> {t['q']}, {t['k']}, {t['v']} ; {s} ; flops: {_flops(call, True, 's')}"


def _band(call: Call) -> str:
    """How far a row sees in a window: blocks that are further away go to no rank."""
    window = call.argument("window")
    if window is None:
        return ""
    return f" before {window - 1} after {0 if call.argument('is_causal') else window - 1}"


def _blocks(query: Sequence[int], itemsize: int) -> str:
    """Bytes of keys and values."""
    rows = f"{itemsize}*{_rows(query)}*h*s"
    return f"{rows}*d+{rows}*e"


def _rows(query: Sequence[int]) -> str:
    return "*".join(_batch(query)) or "1"


def _wide(itemsize: int) -> int:
    """Bytes of an element of sums."""
    return 8 if itemsize == 8 else 4


def _native(call: Call) -> str | None:
    """A forward kernel of torch: (query, key, value[, mask]) -> (out, logsumexp, states of random numbers...)."""
    query = call.operands[0].shape
    t = _native_tensors(call, query)
    mask = "".join(f", {_mask(spec.shape, query)}" for spec in call.operands[3:])
    return None if t is None else _native_rule(call, query, f"{t['q']}, {t['k']}, {t['v']}{mask}", [t["o"], t["l"]])


def _native_backward(call: Call) -> str | None:
    """A backward kernel of torch: operands are told apart by their names in the schema."""
    query = call.argument("query").shape
    t = _native_tensors(call, query)
    if t is None:
        return None
    known = {"query": t["q"], "key": t["k"], "value": t["v"], "out": t["o"], "logsumexp": t["l"]}
    known |= {"grad_out": t["o"], "grad_out_": t["o"]}
    dims = []
    for name, spec in _named_operands(call):
        masks = name in ("attn_bias", "attn_mask") and spec.shape != (0,)
        dims.append(_mask(spec.shape, query) if masks else _fitting(known.get(name, "[...]"), spec, query))
    masks_at = [i for i, (name, _) in enumerate(_named_operands(call)) if name in ("attn_bias", "attn_mask")]
    grad_mask = [dims[masks_at[0]]] if masks_at and len(call.outputs) == 4 else []
    return _native_rule(call, query, ", ".join(dims), [t["q"], t["k"], t["v"], *grad_mask], backward=True)


def _native_rule(
    call: Call, query: Sequence[int], operands: str, outputs: Sequence[str], backward: bool = False
) -> str:
    """Outputs beyond those named (states of random numbers, debug masks) are whole and equal on every rank."""
    kept = "" if backward else "".join(f" ; {name}: -" for name in (*_batch(query), "h", "g", "s"))
    named = [*outputs, *["[...]"] * (len(call.outputs) - len(outputs))]
    dims = [_fitting(dims, spec, query) for dims, spec in zip(named, call.outputs, strict=True)]
    return f"{operands} -> {', '.join(dims)}{kept} ; flops: {_formula(query, backward, 't')}"


def _fitting(dims: str, spec: TensorSpec | None, query: Sequence[int]) -> str:
    """The dims of a tensor that may be missing (rank 0 or empty), or have a last dim of size 1 (cuDNN's logsumexp)."""
    if spec is None or not spec.shape:
        return ""
    if 0 in spec.shape:
        return "[...]"
    is_logsumexp = dims.endswith("s") or dims.endswith("[s]")
    return f"{dims} 1" if is_logsumexp and len(spec.shape) == len(query) else dims


def _native_tensors(call: Call, query: Sequence[int]) -> dict[str, str] | None:
    """The dims of a kernel that knows no global index: a causal sequence stays whole; None for one that draws."""
    if call.argument("dropout_p") > 0.0:
        return None
    return _tensors(query, "[s]" if call.argument("is_causal") else "s")


def _named_operands(call: Call) -> list[tuple[str, TensorSpec]]:
    names = [argument.name for argument in call.target._schema.arguments]
    given = [*zip(names, call.args, strict=False), *call.kwargs]
    return [(name, spec) for name, spec in given if isinstance(spec, TensorSpec)]


def _rope(call: Call) -> str:
    """Pairs of a head are turned by angles that all heads share; a batch of 1 for all samples, too."""
    batch = "b" if call.operands[1].shape[0] == call.operands[0].shape[0] else "1"
    return f"b h s [d], {batch} s [d], {batch} s [d] -> b h s [d] ; linear: x - -"


_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_OVERRIDEABLE = "fused_attention_overrideable"

ATTENTION_RULES: Mapping[str, Callable[[Call], str | None]] = {
    "autopar.attention": _attention,
    "autopar.attention_backward": _attention_backward,
    "autopar.attention_backward_with_mask": _attention_backward,
    "autopar.ring_attention": _ring,
    "autopar.ring_attention_backward": _ring_backward,
    "autopar.rope": _rope,
    "autopar.rope_backward": _rope,
}
NATIVE_ATTENTION_RULES: Mapping[str, Callable[[Call], str | None]] = {
    **{f"aten._scaled_dot_product_{kernel}": _native for kernel in (*_KERNELS, _OVERRIDEABLE)},
    **{f"aten._scaled_dot_product_{kernel}_backward": _native_backward for kernel in (*_KERNELS, _OVERRIDEABLE)},
}
