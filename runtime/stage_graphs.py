"""The bound graphs of one stage, and what goes into and out of each of its passes.

F(values, statistics, received) -> results, sent, saved        B(saved, tangents, totals) -> sent
                                                               I(saved, tangents, totals) -> sent, kept
                                                               W(kept, totals)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.passes.micro_batches import drawing_for
from autopar.passes.weight_gradients import BackwardGraphs
from autopar.program import MicroProgram, Program
from autopar.runtime.kernels import GraphCall, kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraphs:
    """Graphs of one stage on this rank, compiled at their first use; random numbers differ from part to part.

    lowered: the stage's program. results: loss and outputs that it makes; sent_forward, sent_backward: the values that
    it makes for others, each once; gradients: names of the gradients of its backward, what is sent first.
    """

    lowered: Program
    forward: fx.GraphModule
    backward: BackwardGraphs | None
    results: tuple[str, ...]
    sent_forward: tuple[str, ...]
    sent_backward: tuple[str, ...]
    gradients: tuple[str, ...]
    micro: MicroProgram
    backend: str
    _made: dict[tuple[str, int, int], GraphCall] = field(default_factory=dict)

    def run_forward(
        self, values: Mapping[str, torch.Tensor], part: int, pieces: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
        """(results, values for other stages, saved). values: inputs by name."""
        arguments = [values[value.name] for value in self.lowered.inputs if value.role != "tangent"]
        returned = list(self._call("F", self.forward, part, pieces)(arguments))
        made, ends = len(self.results), len(self.results) + len(self.sent_forward)
        return returned[:made], returned[made:ends], returned[ends:]

    def run_backward(
        self, saved: list[Any], totals: Mapping[str, torch.Tensor], part: int, pieces: int, *, weights: bool
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """(gradients for other stages, what the gradients of the weights need). saved: with the tangents, emptied;
        weights: those gradients too, so that nothing is kept for them."""
        assert self.backward is not None
        kind, graph, added = (
            ("B", self.backward.whole, self.backward.totals)
            if weights
            else ("I", self.backward.inputs, self.backward.input_totals)
        )
        saved += [totals[self.gradients[index]] for index in added]
        returned = list(self._call(kind, graph, part, pieces)(saved))
        sent = len(self.sent_backward)
        return returned[:sent], returned[sent:]

    def run_weights(self, kept: list[Any], totals: Mapping[str, torch.Tensor], part: int, pieces: int) -> None:
        """Add the gradients that I left out. kept: emptied."""
        assert self.backward is not None
        kept += [totals[self.gradients[index]] for index in self.backward.weight_totals]
        self._call("W", self.backward.weights, part, pieces)(kept)

    def _call(self, kind: str, graph: fx.GraphModule, part: int, pieces: int) -> GraphCall:
        key = (kind, part, pieces) if self.micro.draws else (kind, 0, 1)
        if key not in self._made:
            if self.micro.draws:
                graph = drawing_for(graph, self.micro.draws, part, self.micro.count, pieces)
            self._made[key] = kernels(graph, backend=self.backend)
        return self._made[key]


def zero_totals(
    forms: Mapping[str, tuple[Sequence[int], torch.dtype]], device: torch.device
) -> dict[str, torch.Tensor]:
    """A total of zeros per gradient. forms: parameter -> local shape and dtype of its gradient."""
    return {name: torch.zeros(tuple(shape), dtype=dtype, device=device) for name, (shape, dtype) in forms.items()}
