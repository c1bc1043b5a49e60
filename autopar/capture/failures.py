"""Turn what torch raises while it traces into errors that name the user's line and the next step.

    if hidden.sum() > 0:      -->  Net decides by the values of a tensor at net.py:12 (if hidden.sum() > 0:), ...
                                   choose with torch.where(condition, a, b) instead of if, which keeps one graph

torch's own traceback goes to the log at level DEBUG; the error that users see holds none of it.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar._compat import DataDependentOutputException, DynamicOutputShapeException
from autopar.capture.user_kernels import ADVICE
from autopar.errors import AutoparError, CaptureError

log = logging.getLogger(__name__)

_DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException)
_TORCH = str(Path(torch.__file__).parent)
_TRITON = str(Path(_TORCH).parent / "triton")
_LIBRARIES = (_TORCH, _TRITON, str(Path(__file__).parent))
_MODULES = str(Path(_TORCH, "nn", "modules"))

NUMPY_HINT = "use torch operators instead of numpy: they take tensors as they are"
VALUES_BY_SOURCE = (
    ("momentum=None", "cumulative averages count their calls on the host: give the batch norm a momentum, such as 0.1"),
    ("assert ", "check outside forward, or leave the assertion out: a graph has no place for it"),
    (".item()", "keep the 0-dim tensor itself instead of .item(): arithmetic takes it like a number"),
    (".tolist()", "keep the tensor instead of .tolist(): index and stack tensors"),
    (".numpy()", NUMPY_HINT),
    ("np.", NUMPY_HINT),
    ("numpy.", NUMPY_HINT),
    ("while ", "run a fixed number of rounds and freeze finished values with torch.where"),
    ("if ", "choose with torch.where(condition, a, b) instead of if, which keeps one graph"),
    ("float(", "keep the 0-dim tensor itself instead of float(): arithmetic takes it like a number"),
    ("int(", "keep the 0-dim tensor itself instead of int(), or pass the number as an argument"),
)
"""What the failing source line holds -> the smallest change that would help; the first that fits."""

_VALUES_DEFAULT = "use torch.where or a mask in place of the choice, or move it out of forward"
_SHAPE_HINT = (
    "keep all elements and mask: x * mask, torch.where(mask, x, 0), sum(x * mask) / sum(mask) instead of x[mask].mean()"
)

OTHERWISE = (
    ' Or keep the code: branches="example" (--branches example) takes the way that real example inputs take, and '
    "checks in every call that it still holds."
)

KNOWN_MESSAGES = (
    ("is not supported for tensor subclasses", NUMPY_HINT),
    ("Cannot backprop through mirrored meta", "call torch.autograd.grad, or return the loss: backward runs outside"),
    ("_nested_tensor", "pad to one length and mask: a graph has one shape"),
    ("NestedTensor", "pad to one length and mask: a graph has one shape"),
    ("Cannot access data pointer", ADVICE),
    ("quantized", "quantised operators have no gradient: train in bf16 or fp32"),
    (
        "expected a torch.ByteTensor, but got NoneType",  # set_rng_state in the backward of a reversible network
        "build it without reversible layers, whose backward runs the forward again: the plan chooses what is "
        'recomputed (recompute="full" for the least memory), and dropout draws alike in both',
    ),
    (
        "torch.distributed.nn.functional",
        "leave the collective out: the compiled model sees the whole batch and sums over ranks by itself",
    ),
    ("modified by an inplace operation", "write out of place what backward needs: x = x + y instead of x += y"),
)
"""What torch's message holds -> the smallest change that would help."""


@contextlib.contextmanager
def explained(model: nn.Module, takes_branches: bool = False) -> Iterator[None]:
    """Within the context, errors of the trace become CaptureErrors with the place in the user's code.

    takes_branches: whether `branches="example"` was said already."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        log.debug("the trace of %s failed", type(model).__name__, exc_info=error)
        message = _explain(model, error) + ("" if takes_branches else _option(error))
        raise CaptureError(message) from None


def _explain(model: nn.Module, error: Exception) -> str:
    place, source = user_line(error)
    name = type(model).__name__
    if _is_shape_dependent(error):
        return (
            f"{name} makes a tensor whose shape depends on values ({_first_line(error)}) at {place}, so it has no "
            f"single graph: {_SHAPE_HINT}."
        )
    if _is_data_dependent(error):
        hint = next((hint for words, hint in VALUES_BY_SOURCE if words in source), _VALUES_DEFAULT)
        return f"{name} decides by the values of a tensor at {place}, so it has no single graph: {hint}."
    if _launches_kernel(error):
        return f"{name} launches a Triton kernel outside of an operator at {place}: {ADVICE}."
    message = _first_line(error)
    what = f"{name} cannot be traced at {place}: {type(error).__name__}: {message}"
    hint = next((hint for words, hint in KNOWN_MESSAGES if words in message), "")
    return f"{what.rstrip('.')}. What helps: {hint}." if hint else what


def _option(error: Exception) -> str:
    """What else helps where values decide."""
    return OTHERWISE if _is_shape_dependent(error) or _is_data_dependent(error) else ""


def _launches_kernel(error: BaseException) -> bool:
    launcher = str(Path(_TRITON, "runtime"))
    return any(frame.filename.startswith(launcher) for frame in traceback.extract_tb(error.__traceback__))


def _is_data_dependent(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _DATA_DEPENDENT) or "data-dependent" in _first_line(error).lower():
            return True
        error = error.__cause__
    return False


def _is_shape_dependent(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, DynamicOutputShapeException):
            return True
        error = error.__cause__
    return False


def user_line(error: BaseException) -> tuple[str, str]:
    """(`file:line (source)` of the innermost frame outside torch and autopar, the source lines to look for a cause).

    Where a module of torch's decided, its line is named too.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [i for i, f in enumerate(frames) if not f.filename.startswith((*_LIBRARIES, "<"))]
    own = [i for i in own if "/importlib/" not in frames[i].filename and "contextlib.py" not in frames[i].filename]
    if not own:
        return "an unknown place", ""
    frame = frames[own[-1]]
    place = f"{frame.filename}:{frame.lineno} ({frame.line})"
    inside = [f for f in frames[own[-1] + 1 :] if f.filename.startswith(_MODULES) and "/module.py" not in f.filename]
    if not inside:
        return place, str(frame.line)
    deepest = inside[-1]
    relative = Path(deepest.filename).relative_to(Path(_TORCH).parent)
    cause = "momentum=None" if "num_batches_tracked" in str(deepest.line) else str(deepest.line)
    return f"{place}, inside {relative}:{deepest.lineno} ({deepest.line})", cause


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
