"""What a step of a pipeline holds on to, and what it lets go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from autopar.runtime.pipeline.pipeline_run import PipelineRun
from autopar.schedules.actions import PipeAction


def test_backward_lets_go_of_what_arrived_before_its_graph_runs() -> None:
    """So that the graph frees each as soon as it was read."""
    received = {"dy": torch.ones(2)}
    held: list[dict[str, torch.Tensor]] = []

    def run_backward(saved: list[Any], *rest: Any, weights: bool) -> tuple[list[torch.Tensor], list[Any]]:
        held.append(dict(received))
        assert [value.numel() for value in saved] == [3, 2]
        return [], []

    graphs = SimpleNamespace(
        backward=1,
        last=None,
        lowered=SimpleNamespace(inputs=(SimpleNamespace(name="dy", role="tangent"),)),
        run_backward=run_backward,
        sent_backward=(),
    )
    run = PipelineRun(
        step=cast(Any, SimpleNamespace(graphs={0: graphs})),
        bind=cast(Any, None),
        pieces=1,
        schedule=cast(Any, ()),
        gradients={},
        wires=cast(Any, None),
        loss_scale=1.0,
        before=None,
    )
    run.saved[0, 0] = [torch.ones(3)]
    run.prepared[0], run.totals[0] = [], {}
    run._send = lambda action, values: None  # type: ignore[method-assign, misc]
    run.act(PipeAction(0, "B", 0), received)
    assert held == [{}]
