"""Checks of values that only raise are taken to pass while a model is traced: they compute nothing.

    assert ids.max() < vocab                       passes
    if labels.max() >= vocab: raise ValueError     does not raise
    if hidden.sum() > 0: hidden = -hidden          is a choice: the trace fails there, see `failures.py`

Which of them asks is read from the source of the calling statement. The compiled model does not check.
"""

from __future__ import annotations

import ast
import linecache
import logging
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)

_TORCH = str(Path(torch.__file__).parent)
_ASKS = (Tensor.__bool__, Tensor.item)


class PassedChecks(TorchFunctionMode):
    """Within the mode, a truth value that only an assertion or a raise depends on is answered so that it passes."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _ASKS and args[0].dtype == torch.bool:
            frame = _caller(sys._getframe(1))
            answer = None if frame is None else passing_answer(frame.f_code.co_filename, frame.f_lineno)
            if answer is not None and frame is not None:
                log.info("%s:%d only checks values: taken to pass", frame.f_code.co_filename, frame.f_lineno)
                return answer
        return func(*args, **(kwargs or {}))


def _caller(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, str(Path(__file__).parent))):
        frame = frame.f_back
    return frame


def asking_line(frame: FrameType) -> str:
    """`file:line (source)` of the innermost frame outside torch and autopar."""
    found = _caller(frame)
    if found is None:
        return "an unknown place"
    name, line = found.f_code.co_filename, found.f_lineno
    source = linecache.getline(name, line).strip()
    return f"{name}:{line} ({source})" if source else f"{name}:{line}"


@lru_cache(maxsize=256)
def passing_answer(filename: str, line: int) -> bool | None:
    """The truth value with which the check at this line passes; None where the line is no check, or not a plain one."""
    statement = _statement(filename, line)
    if isinstance(statement, ast.Assert):
        return _answer(statement.test, True)
    if isinstance(statement, ast.If) and not statement.orelse and _only_raises(statement.body):
        return _answer(statement.test, False)
    return None


def _only_raises(body: list[ast.stmt]) -> bool:
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def _answer(test: ast.expr, wanted: bool) -> bool | None:
    """The value of the tensor in `test` that makes it `wanted`."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, wanted = test.operand, not wanted
    if isinstance(test, ast.BoolOp):  # all operands as wanted make the whole as wanted
        return wanted if not any(isinstance(part, ast.UnaryOp) for part in test.values) else None
    compares_item = isinstance(test, ast.Compare) and any(
        isinstance(node, ast.Attribute) and node.attr == "item" for node in ast.walk(test)
    )
    return None if compares_item else wanted


def _statement(filename: str, line: int) -> ast.stmt | None:
    """The assert or if that holds `line`: parsed from its first line on, until it is whole."""
    for start in range(line, max(line - 6, 0), -1):
        text = linecache.getline(filename, start).strip()
        if not text.startswith(("assert ", "if ", "assert(", "if(")):
            continue
        lines: list[str] = []
        for number in range(start, start + 20):
            lines.append(linecache.getline(filename, number))
            block = textwrap.dedent("".join(lines))
            try:
                parsed = ast.parse(block)
            except SyntaxError:
                continue
            return _whole(parsed.body[0], filename, start, len(lines))
        return None
    return None


def _whole(statement: ast.stmt, filename: str, start: int, count: int) -> ast.stmt | None:
    """An if is whole only with what follows at its indentation: else branches and further lines of its body."""
    if not isinstance(statement, ast.If):
        return statement
    indentation = len(linecache.getline(filename, start)) - len(linecache.getline(filename, start).lstrip())
    lines = [linecache.getline(filename, number) for number in range(start, start + count)]
    for number in range(start + count, start + 60):
        text = linecache.getline(filename, number)
        own = len(text) - len(text.lstrip())
        is_branch = own == indentation and text.lstrip().startswith(("else", "elif"))
        if text.strip() and own <= indentation and not is_branch and not text.lstrip().startswith(")"):
            break
        lines.append(text)
        if not text:
            break
    try:
        return ast.parse(textwrap.dedent("".join(lines))).body[0]
    except SyntaxError:
        return None
