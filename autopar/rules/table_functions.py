"""Rules of operators whose dims depend on attributes or shapes: each function returns a string of the rule language.

    repeat of (4, 6) by (2, 1)  -->  "a0 a1 -> (r0 a0) (r1 a1) ; linear: x ; r0 = 2 ; r1 = 1"

A function returns None when no split is known for this call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from autopar.rules.call import Call


def _attribute(call: Call, name: str) -> int:
    value = call.argument(name)
    assert isinstance(value, int)
    return value


def _tiled_mlp(call: Call, *, backward: bool) -> str:
    """Rows are split freely; blocks of the hidden width leave summands of the result, and of the gradient of x."""
    into, behind = ("[k] f", "f [o]") if call.argument("columns") else ("f [k]", "[o] f")
    weights = len(call.argument("weights"))
    parameters = [*[into] * weights, *["f"] * len(call.argument("biases")), behind]
    given = ", ".join(["n [k]", *parameters])
    if not backward:
        return f"{given} -> n [o] ; flops: {2 * weights}*n*k*f + 2*n*f*o"
    linear = " ".join(["x", "-", *["-"] * len(parameters)])
    return f"n [o], {given} -> {given} ; linear: {linear} ; flops: {6 * weights}*n*k*f + 4*n*f*o"


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


def _cat(call: Call) -> str:
    """Tensors of shape (0,) beside others of more dims are no part of the result: torch passes over them."""
    output = call.outputs[0]
    assert output is not None
    passed_over = [spec.shape == (0,) and len(output.shape) > 1 for spec in call.operands]
    operands = ", ".join("[...]" if passed else "..." for passed in passed_over) if any(passed_over) else "...*"
    return f"{operands} -> ... ; whole: dim ; linear: all"


def _stack(call: Call) -> str:
    rank = len(call.operands[0].shape)
    at = _attribute(call, "dim") % (rank + 1)
    dims = [f"a{i}" for i in range(rank)]
    return f"{' '.join(dims)}* -> {' '.join([*dims[:at], '_', *dims[at:]])} ; linear: all"


def _unfold_backward(call: Call) -> str:
    """Windows are added where they came from; a dim of size 1 grows to that of the result (torch's istft)."""
    shape, sizes = call.operands[0].shape, call.argument("input_sizes")
    at = _attribute(call, "dim") % len(sizes)
    inner = ["1" if size == 1 else f"a{i}" for i, size in enumerate(shape[:-1])]
    outer = [f"x{i}" if dim == "1" else dim for i, dim in enumerate(inner)]
    inner[at] = outer[at] = "_"
    return f"{' '.join(inner)} _ -> {' '.join(outer)} ; linear: x"


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


def _linalg_solve(call: Call) -> str:
    """Right-hand sides are matrices, or vectors where they have as many dims as the batch and one."""
    matrices, right = call.operands[0].shape, call.operands[1].shape
    is_vector = len(right) == 1 or (len(matrices) - 1 == len(right) and right == matrices[:-1])
    solved = "... _" if is_vector else "... _ _"
    return f"... _ _, {solved} -> {solved}, ... _ _, ... _, ..."


RULE_FUNCTIONS: Mapping[str, Callable[[Call], str | None]] = {
    "aten.expand": _expand,
    "aten.repeat": _repeat,
    "aten.cat": _cat,
    "aten.stack": _stack,
    "aten.unfold_backward": _unfold_backward,
    "aten.histc": _histc,
    "aten._trilinear": _trilinear,
    "aten._linalg_solve_ex": _linalg_solve,
    "autopar.tiled_mlp": partial(_tiled_mlp, backward=False),
    "autopar.tiled_mlp_backward": partial(_tiled_mlp, backward=True),
}
