"""What if: many questions about one model, each answered in a part of the time of the first.

    planner = autopar.Planner(model, inputs, cluster="8 H100-SXM", optimizer=torch.optim.AdamW)
    free = planner.plan()
    tight = planner.plan(memory_limit="40GiB")
    fixed = planner.plan(constraints={"lm_head.weight": "R"})

The model is captured once. What does not depend on the question is kept: prices of every mesh, and its optimum without
a memory limit. The last plan is where the next search begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from autopar.capture import Captures, normalize_example_inputs, without_wrappers
from autopar.errors import ConfigurationError
from autopar.explain.origin import WISHES, bound, remembering
from autopar.explain.source import Source
from autopar.hardware.cluster import Cluster
from autopar.plans.logical_shards import Deterministic
from autopar.plans.parallel_plan import Plan
from autopar.questions import as_cluster, capture_example, check_model
from autopar.request import LossFunction, Request
from autopar.request.argument_types import Branch
from autopar.request.axis_ways import ContextParallelism, ExpertParallelism
from autopar.request.constraints import Recompute
from autopar.request.expert_load import ExpertLoad
from autopar.request.lossy import Lossy
from autopar.request.offload import Offload
from autopar.request.replicated_experts import ReplicatedExperts
from autopar.request.search_mode import Mode


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
        loss_fn: LossFunction | None = None,
        optimizer: Any = None,
        precision: str | None = None,
        reduce_dtype: str | None = None,
        batch_dims: Mapping[str, int | None] | None = None,
        branches: Branch | None = None,
    ) -> None:
        check_model(model)
        self._request = Request(
            cluster=as_cluster(cluster),
            loss_fn=loss_fn,
            optimizer=optimizer,
            precision=precision,
            reduce_dtype=reduce_dtype,
            batch_dims=batch_dims,
            branches=branches,
            with_baselines=False,
        )
        self._model, self._last = model, None
        args, kwargs = normalize_example_inputs(example_inputs)
        with without_wrappers(model) as plain:
            self._source = Source.of(capture_example(plain, args, kwargs, self._request, Captures()))

    _model: nn.Module
    """Held, as a source holds it weakly."""
    _last: Plan | None

    def plan(
        self,
        *,
        mesh: Sequence[int] | None = None,
        dims: Mapping[str, int | Sequence[int]] | None = None,
        memory_limit: float | str | None = None,
        constraints: Any = None,
        micro_batches: int | None = None,
        schedule: str | None = None,
        recompute: Recompute | None = None,
        offload: Offload | None = None,
        lossy: Lossy | None = None,
        kernels: Sequence[str] | None = None,
        cp: ContextParallelism | None = None,
        ep: ExpertParallelism | None = None,
        expert_load: ExpertLoad | None = None,
        expert_capacity: float | None = None,
        replicated_experts: ReplicatedExperts | None = None,
        mode: Mode = "default",
        time_limit: float | None = None,
        warm_start: Plan | str | Path | None = None,
        discover: bool = False,
        deterministic: Deterministic = False,
        with_baselines: bool = False,
    ) -> Plan:
        """The best plan under these restrictions; each question stands for itself, nothing is carried over.

        Raises ConfigurationError, InfeasibleError and UnsupportedOperatorError.
        """
        request = replace(
            self._request,
            mesh=mesh,
            dims=dims,
            memory_limit=memory_limit,
            constraints=constraints,
            micro_batches=micro_batches,
            schedule=schedule,
            recompute=recompute,
            offload=offload,
            lossy=lossy,
            kernels=kernels,
            cp=cp,
            ep=ep,
            expert_load=expert_load,
            expert_capacity=expert_capacity,
            replicated_experts=replicated_experts,
            mode=mode,
            time_limit=time_limit,
            warm_start=warm_start or self._last,
            discover=discover,
            deterministic=deterministic,
            with_baselines=with_baselines,
        )
        with without_wrappers(self._model):
            self._last = remembering(self._source.plan(request), replace(self._source, request=request))
        return self._last

    def bind(self, plan: Plan, **asked: Any) -> Plan:
        """A plan from a file with this model behind it, so that it can be asked: `explain`, `memory`, `what_if`,
        `edit`, `code`. asked: the arguments of `plan` with which it was made (memory_limit=, constraints=, dims=, ...);
        the memory limit is that of the file where none is given.

        Raises ConfigurationError for an unknown argument and PlanMismatchError for the plan of another program.
        """
        unknown = sorted(asked.keys() - WISHES)
        if unknown:
            raise ConfigurationError(f"bind does not take {', '.join(unknown)}: write {', '.join(sorted(WISHES))}")
        if asked.get("memory_limit") is None:
            asked["memory_limit"] = plan.question.get("memory_limit_bytes")
        source = replace(self._source, request=replace(self._request, **asked))
        with without_wrappers(self._model):
            return bound(plan, source)
