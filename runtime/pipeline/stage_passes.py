"""The bound graphs of one stage, and what goes into and out of each of its passes.

P(parameters) -> prepared                            once per step, before all others
F(values, received, prepared) -> results, sent, saved
B(saved, tangents, prepared, totals) -> sent         I(saved, tangents, prepared, totals) -> sent, kept
                                                     W(kept, totals)
R(totals) -> gradients                               once per step, behind all others

Where a rank runs all micro-batches one after the other, P is in its first F and R in its last B. In a pipeline R is in
the last pass of a stage's backward, or starts behind it where that sends, and what waits for R runs behind all passes.

Totals are the gradients of this stage's parameters, added up over micro-batches and not yet summed over the ranks
where that can wait (`passes/stages/late_sums.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.passes.lowering.micro_batch_graphs import drawing_for
from autopar.passes.stages.late_sums import CutGraph
from autopar.passes.stages.once_per_step import Prepared
from autopar.passes.stages.weight_gradients import BackwardGraphs
from autopar.program import MicroProgram, Program
from autopar.runtime.kernels import GraphCall, kernels
from autopar.runtime.pipeline.pipeline_wires import Form
from autopar.schedules.actions import Kind

Totals = dict[int, torch.Tensor]
"""By the index of the gradient among those of the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCalls:
    """Bound graphs as calls, compiled at their first use; where they draw random numbers, every part runs its own.
    folds: sums over ranks are those of logical shards."""

    micro: MicroProgram
    backend: str
    folds: bool = False
    _made: dict[tuple[fx.GraphModule, int, int], GraphCall] = field(default_factory=dict)

    def of(self, graph: fx.GraphModule, part: int = 0, pieces: int = 1) -> GraphCall:
        """The call of a graph in one part. pieces: see `drawing_for`."""
        key = (graph, part, pieces) if self.micro.draws else (graph, 0, 1)
        if key not in self._made:
            if self.micro.draws:
                graph = drawing_for(graph, self.micro.draws, part, self.micro.count, pieces)
            self._made[key] = kernels(graph, backend=self.backend, folds=self.folds)
        return self._made[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraphs:
    """Graphs of one stage on this rank, bound to its processes.

    lowered: the stage's program. backward: whole, which adds to `totals`; halves: the same in two pieces. results: loss
    and outputs that it makes; sent_forward, sent_backward: the values that it makes for others, each once; gradients:
    names of the gradients of its backward, what is sent first. prepared: what is made once of the parameters, None:
    nothing; late: the sums over ranks that wait, None: none do. first: forward with what is prepared in it; last: the
    last pass of backward, of `last_kind`, with the sums that wait in it; None: they run by themselves, behind it.
    ending: what waits for these sums behind all passes; None: who starts them waits.
    """

    lowered: Program
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    totals: tuple[int, ...]
    halves: BackwardGraphs | None
    prepared: Prepared | None
    late: CutGraph | None
    first: fx.GraphModule | None
    last: fx.GraphModule | None
    last_kind: Kind | None
    ending: fx.GraphModule | None
    total_forms: Mapping[int, Form]
    results: tuple[str, ...]
    sent_forward: tuple[str, ...]
    sent_backward: tuple[str, ...]
    gradients: tuple[str, ...]
    calls: PartCalls

    def run_prepare(self, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What is made once of the parameters, in front of all passes. values: inputs by name."""
        if self.prepared is None or self.first is not None:
            return []
        names = {node.name: value.name for node, value in self._placeholders()}
        arguments = [values[names[parameter]] for parameter in self.prepared.parameters]
        return list(self.calls.of(self.prepared.prepare)(arguments))

    def run_forward(
        self, values: Mapping[str, torch.Tensor], prepared: list[torch.Tensor], part: int, pieces: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
        """(results, values for other stages, saved). values: inputs by name; prepared: filled where this makes it."""
        arguments = [values[value.name] for value in self.lowered.inputs if value.role != "tangent"]
        if self.first is not None and self.prepared is not None and not prepared:
            returned = list(self.calls.of(self.first, part, pieces)(arguments))
            begin = len(returned) - self.prepared.count
            prepared += returned[begin:]
            del returned[begin:]
        else:
            if self.prepared is not None:
                arguments += [prepared[index] for index in self.prepared.of_forward]
            returned = list(self.calls.of(self.forward, part, pieces)(arguments))
        made, ends = len(self.results), len(self.results) + len(self.sent_forward)
        return returned[:made], returned[made:ends], returned[ends:]

    def run_backward(
        self, saved: list[Any], prepared: list[torch.Tensor], totals: Totals, part: int, pieces: int, *, weights: bool
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """(gradients for other stages, what the gradients of the weights need). saved: with the tangents, emptied;
        weights: those gradients too, so that nothing is kept for them."""
        graph, added = self.backward, self.totals
        if not weights:
            assert self.halves is not None
            graph, added = self.halves.inputs, self.halves.input_totals
        assert graph is not None
        if self.prepared is not None:
            saved += [prepared[index] for index in self.prepared.of_backward]
        saved += [totals[index] for index in added]
        returned = list(self.calls.of(graph, part, pieces)(saved))
        sent = len(self.sent_backward)
        return returned[:sent], returned[sent:]

    def run_last(
        self, saved: list[Any], prepared: list[torch.Tensor], totals: Totals, part: int, pieces: int
    ) -> list[Any]:
        """The last pass of backward, where it sends nothing: what `run_ending` takes. saved: with the tangents, or what
        W needs, emptied, as totals is."""
        assert self.last is not None
        added = self.totals
        if self.last_kind == "W":
            assert self.halves is not None
            own = self.halves.weight_totals
            added = (*own, *(index for index in self.totals if index not in own))
        elif self.prepared is not None:
            saved += [prepared[index] for index in self.prepared.of_backward]
        saved += [totals.pop(index) for index in added]
        return list(self.calls.of(self.last, part, pieces)(saved))

    def run_ending(self, started: list[Any]) -> dict[str, torch.Tensor]:
        """Complete gradients of this stage's parameters, by name. started: by the last pass of its backward, or behind
        it, emptied."""
        positions = self.totals if self.last is not None or self.late is None else self.late.positions
        complete = started if self.ending is None else self.calls.of(self.ending)(started)
        return {self.gradients[index]: gradient for index, gradient in zip(positions, complete, strict=True)}

    def run_weights(self, kept: list[Any], totals: Totals, part: int, pieces: int) -> None:
        """Add the gradients that I left out. kept: emptied."""
        assert self.halves is not None
        kept += [totals[index] for index in self.halves.weight_totals]
        self.calls.of(self.halves.weights, part, pieces)(kept)

    def run_reduce(self, totals: Totals) -> tuple[dict[str, torch.Tensor], list[Any]]:
        """(the gradients that nothing sums, by name, what `run_ending` takes). totals: emptied."""
        if self.late is None or not totals:
            return {self.gradients[index]: total for index, total in totals.items()}, []
        waiting = [totals.pop(position) for position in self.late.positions]
        found = {self.gradients[index]: total for index, total in totals.items()}
        totals.clear()
        return found, list(self.calls.of(self.late.reduce)(waiting))

    def rehearse(
        self, values: Mapping[str, torch.Tensor], kinds: Collection[str], pieces: int, device: torch.device
    ) -> None:
        """Compile the graphs of these kinds of passes, by running each once: a rank that compiles within a step
        lets the others wait longer than their transport does. values: inputs by name, zeros where they are missing."""
        blank = {
            value.name: torch.zeros(value.shape, dtype=value.dtype, device=device) for value in self.lowered.inputs
        }
        values = {**blank, **values}
        prepared, totals = self.run_prepare(values), self.zero_totals(device)
        micro = self.calls.micro
        if self.first is not None:
            self.run_forward(values, prepared, 0, pieces)
        for part in range(micro.count if micro.draws else 1):
            self.run_forward(values, prepared, part, pieces)
            for weights in [kind == "B" for kind in ("B", "I") if kind in kinds and self.backward is not None]:
                _, _, saved = self.run_forward(values, prepared, part, pieces)
                saved += [blank[value.name] for value in self.lowered.inputs if value.role == "tangent"]
                _, kept = self.run_backward(saved, prepared, totals, part, pieces, weights=weights)
                if not weights:
                    self.run_weights(kept, totals, part, pieces)
        if self.backward is None or {"B", "I"}.isdisjoint(kinds):
            return
        if self.last is None:
            _, started = self.run_reduce(totals)
            if started:
                self.run_ending(started)
            return
        _, _, saved = self.run_forward(values, prepared, micro.count - 1, pieces)
        saved += [blank[value.name] for value in self.lowered.inputs if value.role == "tangent"]
        if self.last_kind == "W":
            _, saved = self.run_backward(saved, prepared, totals, micro.count - 1, pieces, weights=False)
        self.run_ending(self.run_last(saved, prepared, totals, micro.count - 1, pieces))

    def zero_totals(self, device: torch.device) -> Totals:
        """A total of zeros per gradient."""
        return {
            index: torch.zeros(form.shape, dtype=form.dtype, device=device) for index, form in self.total_forms.items()
        }

    def _placeholders(self) -> Iterator[tuple[fx.Node, Any]]:
        return zip(self.lowered.placeholders, self.lowered.inputs, strict=True)
