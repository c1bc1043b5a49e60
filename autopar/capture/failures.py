"""Turn what torch raises while it traces into errors that name the user's line and the next step."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar.errors import AutoparError, CaptureError

_DATA_DEPENDENT = (GuardOnDataDependentSymNode, torch._subclasses.fake_tensor.DataDependentOutputException)
_LIBRARIES = tuple(str(Path(module).parent) for module in (torch.__file__, __file__))


@contextlib.contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Within the context, errors of the trace become CaptureErrors with the place in the user's code."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        raise CaptureError(_explain(model, error)) from error


def _explain(model: nn.Module, error: Exception) -> str:
    place = user_line(error)
    name = type(model).__name__
    if _is_data_dependent(error):
        return (
            f"{name} decides by the values of a tensor at {place}, so it has no single graph. Use torch.where or a "
            "mask in place of the branch, or move the decision out of forward."
        )
    return f"{name} cannot be traced at {place}: {type(error).__name__}: {_first_line(error)}"


def _is_data_dependent(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _DATA_DEPENDENT) or "data-dependent" in _first_line(error).lower():
            return True
        error = error.__cause__
    return False


def user_line(error: BaseException) -> str:
    """`file:line` of the innermost frame outside torch and autopar."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*_LIBRARIES, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown place"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
