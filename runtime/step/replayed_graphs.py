"""Replayed graphs: forward and backward of a step, each recorded once and replayed (`compile(cuda_graphs=True)`).

    step = Replays(CudaRecorder(), meet).of(step)       # the same step: its graphs are recorded behind two that run

A recorded graph reads and writes the memory that it was recorded with:

    parameters, what backward reads of forward    where they lie; where a parameter lies elsewhere: recorded again
    arguments, buffers, seed, tangents            copied into tensors of the graph, then it is replayed
    results, gradients                            handed out as copies, which later replays leave alone
    what forward saves for backward               handed out as it is; while somebody holds it, forward is not replayed

So whoever calls forward twice before backward has the second call run operator by operator, and its backward with it.
A backward under `no_sync()` is another graph and runs so, too, on what a replay saved. Of several ranks either all
replay or none: they are asked wherever the answer might differ.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed import get_backend

from autopar._compat import foreach_copy_, storage_references
from autopar.ops.dispatch import row_sizes
from autopar.runtime.kernels import GraphCall
from autopar.runtime.step.cuda_recorder import Recorder
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.step.whole_step import WholeStep

log = logging.getLogger(__name__)

WARM_UPS = 2
"""Calls of a graph that run before it is recorded: the first compiles kernels and connects ranks."""
MOST_RECORDINGS = 16
"""Forward graphs that a module records: each keeps what it saves for backward. Graphs of other shapes run as ever."""
_aten = torch.ops.aten
_INDEXED = frozenset({_aten.index.Tensor, _aten.index_put.default})


class Replays:
    """What the graphs of one module share: who records, how ranks agree (`guards/meetings.py`), how many were recorded,
    what was said."""

    def __init__(self, recorder: Recorder, meet: Callable[[Sequence[int], str], list[list[int]]]) -> None:
        self.recorder = recorder
        self._meet = meet
        self._pairs: weakref.WeakSet[_Pair] = weakref.WeakSet()
        self.recordings = 0
        self.said: list[str] = []

    def of(self, step: Step) -> Step:
        """The step with graphs that are replayed; the step itself, and a warning, where they cannot be."""
        why = self._refusal(step)
        if why or not isinstance(step, WholeStep):
            self.say(f"cuda_graphs=True records nothing: {why}")
            return step
        pair = _Pair(step, self)
        return replace(step, forward=pair.forward, backward=None if step.backward is None else pair.backward)

    def on_any_rank(self, mine: bool, what: str) -> bool:
        """Whether something is so on any rank; all ask."""
        return any(said != [0] for said in self._meet([int(mine)], what))

    def may_record(self) -> bool:
        """Count a forward graph that is about to be recorded; False where they are too many."""
        self.recordings += 1
        return self.recordings <= MOST_RECORDINGS

    def recorded(self, pair: _Pair) -> None:
        """Graphs that read other tensors as the same parameters are stale: let go of these tensors."""
        for other in self._pairs:
            if any(place != other.places.get(name, place) for name, place in pair.places.items()):
                other.forget()
        self._pairs.add(pair)

    def say(self, line: str) -> None:
        """Warn, once per module and line."""
        if line not in self.said:
            self.said.append(line)
            log.warning(line)

    def _refusal(self, step: Step) -> str:
        """Why a step cannot be replayed, "" where it can."""
        device = step.groups.device.type
        if device != self.recorder.device_type:
            return f"the module runs on {device}"
        if not isinstance(step, WholeStep):
            return "the plan runs the batch in parts, in the order of a schedule (micro_batches=1, no stages)"
        if not step.groups.is_alone and "nccl" not in (backend := get_backend()):
            return f"collectives of {backend} wait on the host"
        if step.plan.waits_on_host:
            return "buffers of the host come from a pool of their own (offload=)"
        nodes = (node for graph in step.uncut.only.partition.graphs for node in graph.graph.nodes)
        waiting = next((node for node in nodes if waits_for_values(node)), None)
        return "" if waiting is None else f"the host reads what {waiting.meta.get('operator', waiting)} computes"


def waits_for_values(node: fx.Node) -> bool:
    """Whether the host waits for values on the device: an operator that returns a number, or whose size they decide."""
    tags = getattr(node.target, "tags", ())
    if node.target is row_sizes:
        return True
    if node.target in _INDEXED:
        indices: Any = node.args[1]
        return any(isinstance(i, fx.Node) and i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices)
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


@dataclass(frozen=True, slots=True)
class _Recording:
    """inputs: what each replay reads; outputs: what it writes."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    replay: Callable[[], None]


class _Graph:
    """One graph, called `name` in messages: run, recorded, replayed. own: positions of the values that it reads where
    they lie; pool: of memory."""

    def __init__(self, name: str, call: GraphCall, own: Collection[int], pool: Any, replays: Replays) -> None:
        self._name, self._call, self._own, self._pool, self._replays = name, call, frozenset(own), pool, replays
        self._runs = 0
        self._is_refused = False
        self.recording: _Recording | None = None

    @property
    def is_to_be_recorded(self) -> bool:
        """Whether the next replay records it first."""
        return self.recording is None and self._runs >= WARM_UPS and not self._is_refused

    def run(self, values: list[Any]) -> Any:
        """Operator by operator; `values` is emptied."""
        self._runs += 1
        if self._runs > WARM_UPS:
            return self._call(values)
        given = self._held(values)
        values.clear()
        return self._replays.recorder.warm_up(lambda: self._call(given))

    def replayed(self, values: Sequence[Any]) -> Sequence[Tensor] | None:
        """The outputs of a replay, which the next one writes again; None where the graph is to run. A recording keeps
        those of `values` that are its own."""
        with torch.inference_mode(False), torch.no_grad():
            if self.is_to_be_recorded:
                self.recording = self._recorded(values)
            if self.recording is None:
                return None
            copied = [place for place in range(len(values)) if place not in self._own]
            if copied:
                foreach_copy_([self.recording.inputs[place] for place in copied], [values[place] for place in copied])
            self.recording.replay()
            return self.recording.outputs

    def lies_elsewhere(self, values: Sequence[Any]) -> bool:
        """Whether it was recorded with its own values at other places."""
        if self.recording is None:
            return False
        return any(_place_of(self.recording.inputs[place]) != _place_of(values[place]) for place in self._own)

    def _recorded(self, values: Sequence[Any]) -> _Recording | None:
        """The recording, on all ranks; None on all where one of them has none."""
        inputs = self._held(values)
        found, why = None, "another rank cannot record it"
        try:
            replay, outputs = self._replays.recorder.record(lambda: tuple(self._call(list(inputs))), self._pool)
            if all(isinstance(output, Tensor) for output in outputs):
                found = _Recording(inputs, outputs, replay)
            else:
                why = "it returns a number of the host"
        except RuntimeError as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if not self._replays.on_any_rank(found is None, f"the recording of a {self._name} graph"):
            return found
        self.refuse(why)
        return None

    def refuse(self, why: str) -> None:
        """Run it operator by operator from now on."""
        self._is_refused = True
        self._replays.say(f"cuda_graphs=True: a {self._name} graph runs operator by operator: {why}")

    def _held(self, values: Sequence[Any]) -> list[Any]:
        """Values as the graph holds them: its own as they are, of others copies, whose strides stay the same."""
        return [
            value.clone() if isinstance(value, Tensor) and place not in self._own else value
            for place, value in enumerate(values)
        ]


class _Lent:
    """What forward saved at places that the next replay writes again, lent to callers until their backward ran.

    own: what forward reads where it lies; others hold that, too."""

    def __init__(self, saved: Sequence[Tensor], own: Iterable[Tensor], replays: Replays) -> None:
        lasting = {tensor.untyped_storage().data_ptr() for tensor in own}
        written = [tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in lasting]
        self.saved = saved
        self._replays = replays
        self._references = [(tensor, storage_references(tensor)) for tensor in written]
        self._may_be_out = False

    def lend(self) -> list[Tensor]:
        """Tensors for the caller, of the same memory."""
        self._may_be_out = bool(self._references)
        return [tensor.detach() for tensor in self.saved]

    def is_of(self, tensors: Sequence[Any]) -> bool:
        """Whether these are what was lent."""
        return all(
            isinstance(tensor, Tensor) and tensor.data_ptr() == lent.data_ptr()
            for tensor, lent in zip(tensors, self.saved, strict=True)
        )

    def look(self) -> None:
        """Behind a backward pass: is everything back? It is not where retain_graph=True keeps it for another one."""
        self._may_be_out = self._is_held()

    def is_out(self) -> bool:
        """Whether somebody may read it still, on any rank; when that is, may differ, as of all garbage."""
        return self._may_be_out and self._replays.on_any_rank(self._is_held(), "what forward saved")

    def _is_held(self) -> bool:
        return any(storage_references(tensor) > references for tensor, references in self._references)


class _Pair:
    """Forward and backward of a step, in a pool of their own: backward runs before the next forward writes there.

    places: where the recorded ones read parameters, by name."""

    def __init__(self, step: WholeStep, replays: Replays) -> None:
        self._replays = replays
        names = {place: value.name for place, value in enumerate(step.bound_inputs) if value.role == "parameter"}
        self._own, self.places = names, dict[str, tuple[Any, ...]]()
        self._num_results, self._num_saved = len(step.forward_outputs), len(step.uncut.only.partition.saved)
        pool, backward = replays.recorder.pool(), step.backward or step.forward  # without one nobody calls it
        self._forward = _Graph("forward", step.forward, self._own, pool, replays)
        self._backward = _Graph("backward", backward, range(self._num_saved), pool, replays)
        self._lent: _Lent | None = None

    def forward(self, arguments: list[Any]) -> Any:
        """As the forward graph: results, and what backward takes of it."""
        if self._forward.lies_elsewhere(arguments):
            self.forget()
        if self._forward.is_to_be_recorded and not self._replays.may_record():
            self._forward.refuse(f"this module has recorded {MOST_RECORDINGS}, of other shapes or other parameters")
        outputs = None
        if self._lent is None or not self._lent.is_out():
            records = self._forward.is_to_be_recorded  # what it keeps is not to follow `parameter.data = ...`
            outputs = self._forward.replayed([each.detach() for each in arguments] if records else arguments)
        if outputs is None:
            return self._forward.run(arguments)
        if self._lent is None:
            own = {name: arguments[place] for place, name in self._own.items()}
            self._lent = _Lent(outputs[self._num_results :], own.values(), self._replays)
            self.places = {name: _place_of(tensor) for name, tensor in own.items()}
            self._replays.recorded(self)
        arguments.clear()
        return (*_copies(outputs[: self._num_results]), *self._lent.lend())

    def forget(self) -> None:
        """Drop what is recorded, which a next call records anew."""
        self._forward.recording = self._backward.recording = self._lent = None
        self.places.clear()

    def backward(self, arguments: list[Any]) -> Any:
        """As the backward graph: gradients."""
        lent = self._lent
        if lent is None or not lent.is_of(arguments[: self._num_saved]):
            return self._backward.run(arguments)
        outputs = self._backward.replayed([*lent.saved, *arguments[self._num_saved :]])
        if outputs is None:
            return self._backward.run(arguments)
        arguments.clear()
        lent.look()
        return _copies(outputs)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    if copies:
        with torch.no_grad():
            foreach_copy_(copies, list(tensors))
    return copies


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
