"""The order of a chosen pipeline, searched freely: its cut and recomputation stay, its family is where it starts.

    4 ranks, 6 micro-batches    zb-h1 30.2 ms    ->    searched 29.1 ms

Only for small pipelines (`searched_passes`), with what the stages keep in flight under the limit of the device; the
order that is found is played as any other, and taken where it gains and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.cost_models.schedule_player import pass_seconds, play_pipeline, send_list
from autopar.cost_models.stage_costs import StageCosts
from autopar.errors import ConfigurationError
from autopar.later import later
from autopar.planner.pipelines.choose_pipeline import Pipeline
from autopar.planner.problem.limits import LIMITS
from autopar.plans.plan_text import format_seconds
from autopar.request.pipeline_request import SEARCHED
from autopar.schedules.actions import Schedule
from autopar.schedules.list_scheduler import StageTimes
from autopar.schedules.searched import PassMemory, Searched

search_schedule: Callable[..., Searched] = later("autopar.schedules.free_search", "search_schedule")


def search_order(pipeline: Pipeline, effort: float = 5.0) -> tuple[Pipeline, str]:
    """(the pipeline in the best order found, its own where none is shorter and fits; a note on what no order is under).

    effort: the solver's deterministic seconds. Raises ConfigurationError where there are too many passes.
    """
    schedule, stages = pipeline.costs.schedule, pipeline.costs.stages
    passes = 3 * schedule.num_stages * schedule.micro_batches
    if passes > LIMITS.searched_passes:
        raise ConfigurationError(
            f"schedule={SEARCHED!r} orders at most {LIMITS.searched_passes} passes; {schedule.num_stages} stages with "
            f"{schedule.micro_batches} micro-batches have {passes}: use fewer micro-batches, or {pipeline.family!r}"
        )
    borders = pipeline.table.borders([stage.end for stage in pipeline.cut.stages[:-1]], schedule.route(0))
    found = _searched(schedule, stages, borders.seconds, pipeline.table.capacity_bytes, effort)
    costs = play_pipeline(stages, found.schedule, send_seconds=borders.seconds, near=borders.near)
    fits = max(costs.peak_bytes) <= pipeline.table.capacity_bytes
    better = fits and costs.step_seconds < pipeline.step_seconds
    note = (
        f"order searched from {pipeline.family} ({format_seconds(pipeline.step_seconds)}): no order of these stages on "
        f"these rank groups takes less than {format_seconds(found.bound_seconds)}"
    )
    return replace(pipeline, family=SEARCHED, costs=costs if better else pipeline.costs), note


def _searched(
    schedule: Schedule, stages: Sequence[StageCosts], sends: Sequence[float], capacity_bytes: float, effort: float
) -> Searched:
    times = StageTimes(
        forward=tuple(pass_seconds(stage)["F"] for stage in stages),
        backward=tuple(pass_seconds(stage)["I"] for stage in stages),
        weight=tuple(pass_seconds(stage)["W"] for stage in stages),
        send=tuple(send_list(sends, len(stages))),
    )
    memory = PassMemory(
        saved=tuple(stage.saved_bytes for stage in stages),
        until_weight=tuple(min(stage.saved_bytes, stage.weight_saved_bytes) for stage in stages),
    )
    limits = []
    for rank in range(len(schedule.ranks)):
        own = [stage for stage, holder in zip(stages, schedule.rank_of_stage, strict=True) if holder == rank]
        extra = max(max(stage.forward_extra_bytes, stage.backward_extra_bytes) for stage in own)
        limits.append(max(1.0, capacity_bytes - sum(stage.state_bytes for stage in own) - extra))
    return search_schedule(schedule, times, memory, limits, effort=effort)
