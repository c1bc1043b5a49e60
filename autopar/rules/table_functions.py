"""Rules of operators whose dims depend on attributes or shapes: each function returns a string of the rule language.

    repeat of (4, 6) by (2, 1)  -->  "a0 a1 -> (r0 a0) (r1 a1) ; linear: x ; r0 = 2 ; r1 = 1"

A function returns None when no split is known for this call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.rules.call import Call


def _attribute(call: Call, name: str) -> int:
    value = call.argument(name)
    assert isinstance(value, int)
    return value


def _expand(call: Call) -> str:
    """Dims that grow from 1, or that are new, have names of their own."""
    shape, output = call.operands[0].shape, call.outputs[0]
    assert output is not None
    new = len(output.shape) - len(shape)
    inner = ["1" if size == 1 else f"a{i}" for i, size in enumerate(shape)]
    outer = [f"x{i}" for i in range(new)]
    outer += [f"x{new + i}" if size == 1 else inner[i] for i, size in enumerate(shape)]
    return f"{' '.join(inner) or '[...]'} -> {' '.join(outer)} ; linear: x"


def _repeat(call: Call) -> str:
    """A repeated dim is (repetitions, size)."""
    repeats = call.argument("repeats")
    shape = call.operands[0].shape
    new = len(repeats) - len(shape)
    inner = [f"a{i}" for i in range(len(shape))]
    outer = [f"r{i}" for i in range(new)]
    outer += [f"(r{new + i} a{i})" for i in range(len(shape))]
    sizes = "".join(f" ; r{i} = {count}" for i, count in enumerate(repeats))
    return f"{' '.join(inner) or '[...]'} -> {' '.join(outer)} ; linear: x{sizes}"


def _constant_pad_nd(call: Call) -> str:
    pad, rank = call.argument("pad"), len(call.operands[0].shape)
    padded = {rank - 1 - i // 2 for i, amount in enumerate(pad) if amount}
    dims = " ".join("_" if dim in padded else f"a{dim}" for dim in range(rank))
    linear = " ; linear: x" if not call.argument("value") else ""
    return f"{dims} -> {dims}{linear}"


def _stack(call: Call) -> str:
    rank = len(call.operands[0].shape)
    at = _attribute(call, "dim") % (rank + 1)
    dims = [f"a{i}" for i in range(rank)]
    return f"{' '.join(dims)}* -> {' '.join([*dims[:at], '_', *dims[at:]])} ; linear: all"


def _select_scatter(call: Call) -> str:
    rank = len(call.operands[0].shape)
    at = _attribute(call, "dim") % rank
    dims = [f"a{i}" for i in range(rank)]
    whole = [*dims[:at], "_", *dims[at + 1 :]]
    return f"{' '.join(whole)}, {' '.join(dims[:at] + dims[at + 1 :])} -> {' '.join(whole)} ; linear: all"


def _diagonal(call: Call) -> str:
    """The diagonal is the last dim of the output."""
    rank = len(call.operands[0].shape)
    matrix = {call.argument("dim1") % rank, call.argument("dim2") % rank}
    dims = ["_" if dim in matrix else f"a{dim}" for dim in range(rank)]
    return f"{' '.join(dims)} -> {' '.join([d for d in dims if d != '_'] + ['_'])} ; linear: x"


def _diagonal_backward(call: Call) -> str:
    rank = len(call.argument("input_sizes"))
    matrix = {call.argument("dim1") % rank, call.argument("dim2") % rank}
    dims = ["_" if dim in matrix else f"a{dim}" for dim in range(rank)]
    return f"{' '.join([d for d in dims if d != '_'] + ['_'])} -> {' '.join(dims)} ; linear: x"


def _diagonal_scatter(call: Call) -> str:
    """The diagonal of the first operand is replaced by the second."""
    source, result = _diagonal(call).partition(" ; ")[0].split(" -> ")
    return f"{source}, {result} -> {source} ; linear: x x"


def _diag_embed(call: Call) -> str:
    rank = len(call.operands[0].shape) + 1
    matrix = {call.argument("dim1") % rank, call.argument("dim2") % rank}
    dims = ["_" if dim in matrix else f"a{dim}" for dim in range(rank)]
    return f"{' '.join([d for d in dims if d != '_'] + ['_'])} -> {' '.join(dims)} ; linear: x"


def _unfold(call: Call) -> str:
    """Windows along a dim: that dim stays whole, the elements of a window are a new last dim."""
    shape = call.operands[0].shape
    if not shape:
        return "[...] -> [...] ; linear: x"
    at = call.argument("dimension") % len(shape)
    dims = " ".join("_" if dim == at else f"a{dim}" for dim in range(len(shape)))
    return f"{dims} -> {dims} _ ; linear: x"


def _unfold_backward(call: Call) -> str:
    rank = len(call.argument("input_sizes"))
    if not rank:
        return "[...] -> [...] ; linear: x"
    at = call.argument("dim") % rank
    dims = " ".join("_" if dim == at else f"a{dim}" for dim in range(rank))
    return f"{dims} _ -> {dims} ; linear: x"


def _histc(call: Call) -> str:
    """Counts of blocks add up where the bins do not depend on the values."""
    return "[...] -> [...]" if call.argument("min") == call.argument("max") else "... -> [...]"


def _trilinear(call: Call) -> str:
    """A product of three tensors, with dims of size 1 inserted, summed over some dims."""
    expanded = [call.argument(f"expand{i}") for i in (1, 2, 3)]
    rank = len(call.operands[0].shape) + len(expanded[0])
    tensors = [" ".join(f"a{dim}" for dim in range(rank) if dim not in missing) for missing in expanded]
    kept = " ".join(f"a{dim}" for dim in range(rank) if dim not in call.argument("sumdim"))
    return f"{', '.join(tensors)} -> {kept} ; linear: x - - | - x - | - - x ; flops: 2*{'*'.join(_all_dims(rank))}"


def _all_dims(rank: int) -> list[str]:
    return [f"a{dim}" for dim in range(rank)]


def _weight_norm(call: Call) -> str:
    """w = g * v / |v|, one length per position of dim 0 or of the last dim."""
    v, g = _weight_and_length(call, len(call.operands[0].shape))
    return f"{v}, {g} -> {v}, {g}"


def _weight_norm_backward(call: Call) -> str:
    v, g = _weight_and_length(call, len(call.operands[0].shape))
    return f"{v}, {v}, {g}, {g} -> {v}, {g}"


def _weight_and_length(call: Call, rank: int) -> tuple[str, str]:
    at = _attribute(call, "dim") % rank
    v, g = (" ".join("c" if dim == at else other for dim in range(rank)) for other in ("_", "1"))
    return v, g


def _linalg_solve(call: Call) -> str:
    """Right-hand sides are matrices, or vectors where they have as many dims as the batch and one."""
    matrices, right = call.operands[0].shape, call.operands[1].shape
    is_vector = len(right) == 1 or (len(matrices) - 1 == len(right) and right == matrices[:-1])
    solved = "... _" if is_vector else "... _ _"
    return f"... _ _, {solved} -> {solved}, ... _ _, ... _, ..."


RULE_FUNCTIONS: Mapping[str, Callable[[Call], str | None]] = {
    "aten.expand": _expand,
    "aten.repeat": _repeat,
    "aten.constant_pad_nd": _constant_pad_nd,
    "aten.stack": _stack,
    "aten.select_scatter": _select_scatter,
    "aten.diagonal": _diagonal,
    "aten.diagonal_backward": _diagonal_backward,
    "aten.diagonal_scatter": _diagonal_scatter,
    "aten.diag_embed": _diag_embed,
    "aten.unfold": _unfold,
    "aten.unfold_backward": _unfold_backward,
    "aten.histc": _histc,
    "aten._trilinear": _trilinear,
    "aten._weight_norm_interface": _weight_norm,
    "aten._weight_norm_interface_backward": _weight_norm_backward,
    "aten._linalg_solve_ex": _linalg_solve,
}
