"""Rules of expert products: every dim may be split, and no split needs the routing of other ranks.

    t (rows)        data parallel: a rank sorts and multiplies its own rows
    e (experts)     expert parallel: rows of other ranks' experts are zero, which leaves Partial(sum)
    t+e             expert parallel: rows travel to the rank of their expert, and back
    k, n            tensor parallel inside every expert

Each row meets one matrix, so a split of e divides the expected work, as the FLOPs 2*t*k*n say. torch's own grouped
product takes rows that are sorted already: its groups stay whole, and its kernel wants blocks of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.rules.call import Call

_GROUPED_ALIGNMENT_BYTES = 16


def _matrices(call: Call) -> str:
    return "e n k" if call.argument("transposed") else "e k n"


def _expert_linear(call: Call) -> str:
    return (
        f"t k, {_matrices(call)}, t -> t n ; e: sum by masked_experts ; t+e: by dispatched_experts ; "
        "linear: x - - | - x - ; flops: 2*t*k*n"
    )


def _expert_outer(call: Call) -> str:
    return (
        f"t k, t n, t -> {_matrices(call)} ; e: by masked_experts_outer ; t+e: by dispatched_experts_outer ; "
        "linear: x - - | - x - ; flops: 2*t*k*n"
    )


def _grouped_mm(call: Call) -> str | None:
    """`torch._grouped_mm`: groups of rows, of columns, or of the contracted dim, by the dims of the operands."""
    left, right = (operand for operand in call.operands[:2])
    unit = _GROUPED_ALIGNMENT_BYTES // left.dtype.itemsize
    k, n = (_aligned(name, right.shape[dim], unit) for name, dim in (("k", -2), ("n", -1)))
    m = _aligned("m", left.shape[-2], unit)
    if len(call.operands) != 3 or call.argument("bias") is not None:
        return None
    signature = {
        (2, 3): f"[t] {k}, [e] {k} {n}, [e] -> [t] {n} ; flops: 2*t*{_size(k)}*{_size(n)}",
        (3, 2): f"[e] {m} {k}, {k} [t], [e] -> {m} [t] ; flops: 2*t*{_size(k)}*{_size(m)}",
        (2, 2): f"{m} [t], [t] {n}, [e] -> [e] {m} {n} ; flops: 2*t*{_size(m)}*{_size(n)}",
    }.get((len(left.shape), len(right.shape)))
    return None if signature is None else f"{signature} ; u = {unit}"


def _aligned(name: str, size: int, unit: int) -> str:
    """A dim in blocks of `unit` elements; whole if it has no such blocks."""
    return f"({name} [u])" if size % unit == 0 else f"[{name}]"


def _size(dim: str) -> str:
    return dim.strip("[]()").replace(" [", "*")


EXPERT_RULES: Mapping[str, Callable[[Call], str | None]] = {
    "autopar.expert_linear": _expert_linear,
    "autopar.expert_outer": _expert_outer,
    "aten._grouped_mm": _grouped_mm,
}
