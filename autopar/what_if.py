"""What if: many questions about one model, each answered in a part of the time of the first.

    planner = autopar.Planner(model, inputs, cluster="8 H100-SXM", optimizer=torch.optim.AdamW)
    free = planner.plan()
    tight = planner.plan(memory_limit="40GiB")
    fixed = planner.plan(constraints={"lm_head.weight": "R"})

The model is captured once. What does not depend on the question is kept: prices of every mesh, and its optimum without
a memory limit. The last plan is where the next search begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.capture import Captures, normalize_example_inputs, without_wrappers
from autopar.cluster import Cluster
from autopar.parallel_plan import Plan
from autopar.planner.constraints import Recompute
from autopar.planner.kept import Kept
from autopar.planner.search import Mode
from autopar.questions import Options, as_cluster, capture_at, capture_program, check_options, plan_program

KEPT_MESHES = 32
"""Problems that a planner keeps; those of a large model take some hundred MB each."""


class Planner:
    """One model with its inputs and a cluster; `plan` asks. Arguments as of `autopar.plan`.

    Raises ConfigurationError, CaptureError and UnsupportedOperatorError.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        *,
        cluster: Cluster | str | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: Any = None,
        precision: str | None = None,
        batch_dims: Mapping[str, int | None] | None = None,
    ) -> None:
        check_options(model, precision, "global", "default")
        self._options = Options(
            cluster=as_cluster(cluster),
            loss_fn=loss_fn,
            optimizer=optimizer,
            precision=precision,
            batch_dims=batch_dims,
            with_baselines=False,
        )
        self._model, self._kept, self._last = model, Kept(KEPT_MESHES), None
        self._args, self._kwargs = normalize_example_inputs(example_inputs)
        self._captures = Captures()
        with without_wrappers(model) as plain:
            self._program = capture_program(
                plain, self._args, self._kwargs, plain.training, self._options, self._captures
            )

    _last: Plan | None

    def plan(
        self,
        *,
        mesh: Sequence[int] | None = None,
        dims: Mapping[str, int] | None = None,
        memory_limit: float | str | None = None,
        constraints: Any = None,
        micro_batches: int | None = None,
        recompute: Recompute | None = None,
        mode: Mode = "default",
        time_limit: float | None = None,
        warm_start: Plan | str | Path | None = None,
        with_baselines: bool = False,
    ) -> Plan:
        """The best plan under these restrictions; each question stands for itself, nothing is carried over.

        Raises ConfigurationError, InfeasibleError and UnsupportedOperatorError.
        """
        options = replace(
            self._options,
            mesh=mesh,
            dims=dims,
            memory_limit=memory_limit,
            constraints=constraints,
            micro_batches=micro_batches,
            recompute=recompute,
            mode=mode,
            time_limit=time_limit,
            warm_start=warm_start or self._last,
            with_baselines=with_baselines,
        )
        with without_wrappers(self._model) as plain:
            at_batch = functools.partial(
                capture_at, self._program, plain, self._args, self._kwargs, options, self._captures
            )
            self._last = plan_program(self._program, options, None, at_batch, self._kept)
        return self._last
