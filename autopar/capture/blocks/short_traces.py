"""The joint graph of a model from a trace with four members of each of its runs, where it is proven to be equal.

1. The runs: neighbours of equal form (`equal_members`).
2. Two outlines, of the whole and of the shortened model: the code around the members treats all of them alike.
3. The trace of the shortened model. What its members read is equal on all members, and nothing keeps state.
4. The extension of its graph (`sheets`), whose second and third member say how members follow each other.

A member is a deterministic function of its class, its arguments and what it reads, so members that are equal in all
three do what was traced. Whatever fails on the way, an error of the model too, is left to the whole trace.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias
from unittest import mock

from torch import Tensor
from torch.fx import GraphModule

from autopar._compat import FakeTensorMode, recorded_names
from autopar.capture.blocks.equal_members import Run, find_runs, read_alike, reads_of_all, shortened
from autopar.capture.blocks.joint_graphs import Sheet
from autopar.capture.blocks.outlines import Members, Outline
from autopar.capture.blocks.sheets import Extension, UnprovenError
from autopar.capture.python_state import PythonState, forwards
from autopar.capture.training_step import TrainingStep

log = logging.getLogger(__name__)

Trace: TypeAlias = Callable[[TrainingStep], GraphModule]
"""The joint graph of a step, with the reads of its forward left on the step."""
Watched: TypeAlias = Callable[[TrainingStep], AbstractContextManager[tuple[FakeTensorMode, Sequence[Tensor]]]]
"""A context in which the forward of a step runs on fake tensors: their mode and the inputs."""

_enabled = [True]
"""Whether short traces are tried; tests and benchmarks that compare with whole traces turn it off."""


@contextlib.contextmanager
def whole_traces() -> Iterator[None]:
    """Within the context every model is traced as a whole."""
    _enabled.append(False)
    try:
        yield
    finally:
        _enabled.pop()


def trace_by_blocks(step: TrainingStep, trace: Trace, watched: Watched) -> GraphModule | None:
    """The joint graph of `step`, with `step` as a trace leaves it; None where the whole must be traced."""
    if not _enabled[-1] or step.takes_branches:
        return None
    runs = find_runs(step.model)
    if not runs:
        return None
    with _held_back_records() as records:
        try:
            graph_module = _extended(step, runs, trace, watched)
        except UnprovenError as reason:
            log.info("the whole model is traced: %s", reason)
            return None
        except Exception as error:  # whatever the model raises, the whole trace shall raise and explain
            log.info("the whole model is traced: with fewer members %s: %s", type(error).__name__, error)
            return None
    for logger, record in records:
        logger.handle(record)
    return graph_module


def _extended(step: TrainingStep, runs: Sequence[Run], trace: Trace, watched: Watched) -> GraphModule:
    whole, short = step.again(), step.again()
    outline = _outline(whole, runs, watched, {run: run.members for run in runs})
    with shortened(step.model, runs):
        shorter = _outline(step.again(), runs, watched, {run: run.traced for run in runs})
        _check_outlines(outline, shorter, runs)
        with recorded_names() as names:
            graph_module = trace(short)
    _check_state(whole, short)
    for run in runs:
        differs = read_alike(step.model, run, short.reads)
        if differs is not None:
            raise UnprovenError(f"members of {run.path} differ in {differs}, which they read")
    sheet = Sheet.of(graph_module.graph, names(graph_module.graph))
    for run in runs:
        sheet = sheet.extended(run)
        log.info("%s: %d of %d equal modules are traced", run.path or "the model", len(run.traced), len(run.names))
    step.outputs = whole.outputs
    step.reads = short.reads.union(*(reads_of_all(run, short.reads) for run in runs))
    return sheet.written(graph_module)


def _outline(step: TrainingStep, runs: Sequence[Run], watched: Watched, members: dict[Run, Sequence[str]]) -> Outline:
    index = {path: (run, number) for run in runs for number, path in enumerate(members[run])}
    with contextlib.ExitStack() as stack:
        mode, tensors = stack.enter_context(watched(step))  # where it prepares the model, that stays
        stack.enter_context(_nothing_changed(step))  # read before others stand in for the forwards of the members
        outline = Outline(mode, index)
        outline.given(step)
        for run in runs:
            stack.enter_context(Members(outline, run, members[run]).standing_in(step.model))
        with outline:
            returned = step(*tensors)
        outline.note("returned", returned, ())
    return outline


@contextlib.contextmanager
def _nothing_changed(step: TrainingStep) -> Iterator[None]:
    """What the forwards of all modules reach outside of them is put back. Raises UnprovenError where it had changed."""
    outside = PythonState(step.model, forwards(step.model))
    try:
        yield
    finally:
        is_changed = not outside.unchanged()
        if is_changed:
            outside.put_back()
    if is_changed:
        raise UnprovenError("the forward changes Python state")


def _check_outlines(whole: Outline, short: Outline, runs: Sequence[Run]) -> None:
    """Raises UnprovenError where the outline of the whole is not the extension of the short one."""
    rows = short.rows
    for run in runs:
        marked = [row.of_member(row.source[1] if row.source and row.source[0] is run else None) for row in rows]
        rows = [placed.row for placed in Extension(marked, len(run.names)).placed]
    if len(rows) != len(whole.rows):
        raise UnprovenError(f"the forward takes {len(whole.rows)} steps around its members, expected were {len(rows)}")
    for found, expected in zip(whole.rows, rows, strict=True):
        if found.what != expected.what or repr(found.leaves) != repr(expected.leaves):
            raise UnprovenError(f"around the members the forward does {found.what}, expected was {expected.what}"[:300])


def _check_state(whole: TrainingStep, short: TrainingStep) -> None:
    """Raises UnprovenError where a forward leaves something behind, or returns other things with fewer members."""
    for step in (whole, short):
        if step.state.changed or step.state.changed_outside or step.state.drew_random_numbers:
            raise UnprovenError("the forward changes Python state")
    if whole.outputs != short.outputs:
        raise UnprovenError("with fewer members the forward returns other things")


@contextlib.contextmanager
def _held_back_records() -> Iterator[list[tuple[logging.Logger, logging.LogRecord]]]:
    """Within the context, what autopar logs is collected, but for this module."""
    records: list[tuple[logging.Logger, logging.LogRecord]] = []
    original = logging.Logger.handle

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.name.startswith("autopar.") and record.name != log.name:
            records.append((logger, record))
        else:
            original(logger, record)

    with mock.patch.object(logging.Logger, "handle", handle):
        yield records
