"""Predicting measured pipelines: bubble rate, throughput and memory from one stage's profiled times.

    predict([{"pp_stages": "8", "microbatches": "24", "T_F_us": "18522", ..., "schedule": "1F1B"}], schema, "t0")
    # bubble_rate_paper_tab5 0.2431, samples_per_gpu_per_s_tab4 11.9, peak_mem_gb_tab4 29.6

The bubble rate is that of equal stages, as its authors define it. Throughput and memory are those of the model: other
times on the first and the last stage, the optimizer, and the host, which starts each pass by waiting for a transfer
and launching its first kernels while the device stands idle (the profiled times do not hold that).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from autopar.cost_models.pipeline_program import pipeline_program, stage_programs
from autopar.cost_models.schedule_player import StepCosts, play_pipeline, schedule_for
from autopar.cost_models.simulator import Action, simulate
from autopar.cost_models.stage_costs import StageCosts
from autopar.hardware.devices import Device, preset_device
from autopar.schedules.actions import Schedule, parse_action
from autopar.schedules.list_scheduler import FAMILIES
from benchmarks.validation.fields import Row, Unpredictable, integer, number, text
from benchmarks.validation.gpt_stages import ProfiledGpt, gpt_stages, middle_stage
from benchmarks.validation.schemas import Predicted, Schema, Tier

FAMILY_OF: Mapping[str, str] = {
    "GPIPE": "gpipe",
    "1F1B": "1f1b",
    "1F1B-I": "interleaved",
    "INTERLEAVED": "interleaved",
    "ZB-H1": "zb-h1",
    "ZB-H2": "zb-h2",
    "ZB-1P": "zb-1p",
    "ZB-2P": "zb-2p",
    "ZB-V": "zb-v",
    "ZBV": "zb-v",
}
"""The published names."""

HOST_SECONDS_PER_PASS = 1.0e-3
"""Idle device at the start of every F, B and W: Megatron synchronises after a transfer and launches the next pass into
an empty queue. The only fitted constant here: `fit_host_seconds` on the 24 throughputs of pipe_zero_bubble_a100."""

VOCABULARY = 32_000
"""Rows do not say it. The runs' repository trains with a SentencePiece tokenizer (sail-sg/zero-bubble-pipeline-
parallelism examples/pretrain_zero_bubble.sh); 32,000 is the usual size."""

DEVICE = "A100-80"
"""arXiv 2401.10241, section 5.1."""


def predict(rows: Sequence[Mapping[str, str]], schema: Schema, tier: Tier) -> list[Predicted]:
    """Bubble rate, samples per second and device, and peak GB of each row; tiers t0 and t1 are the same."""
    host_seconds = 0.0 if tier == "physics" else HOST_SECONDS_PER_PASS
    return [_predict_row(row, host_seconds) for row in rows]


def fit_host_seconds(rows: Sequence[Mapping[str, str]], column: str = "samples_per_gpu_per_s_tab4") -> float:
    """The seconds per pass, in steps of 0.1 ms up to 2 ms, that give the least mean error of measured throughputs."""
    measured = [row for row in rows if row[column]]

    def mean_error(host_seconds: float) -> float:
        errors = [abs(throughput(row, host_seconds) / float(row[column]) - 1.0) for row in measured]
        return sum(errors) / len(errors)

    return min((steps * 1e-4 for steps in range(21)), key=mean_error)


def throughput(row: Row, host_seconds: float) -> float:
    """Samples per second and device."""
    return _samples(_model_of(row), _step(row, host_seconds))


def _predict_row(row: Row, host_seconds: float) -> Predicted:
    try:
        model, step = _model_of(row), _step(row, host_seconds)
        values = {
            "bubble_rate_paper_tab5": _published_rate(row),
            "samples_per_gpu_per_s_tab4": _samples(model, step),
            "peak_mem_gb_tab4": max(step.peak_bytes) / 1e9,
        }
    except ValueError as reason:
        return Predicted(reason=str(reason))
    return Predicted(values=values)


def _samples(model: ProfiledGpt, step: StepCosts) -> float:
    return model.micro_batch * step.schedule.micro_batches / (model.stages * step.step_seconds)


def _model_of(row: Row) -> ProfiledGpt:
    if integer(row, "pp_stages") < 1:
        raise Unpredictable("pp_stages is 0: a pipeline has at least one stage")
    return ProfiledGpt(
        layers=integer(row, "layers_actual"),
        hidden=integer(row, "hidden"),
        heads=integer(row, "heads"),
        seq_len=integer(row, "seq_len"),
        micro_batch=integer(row, "micro_batch_seqs"),
        vocab=VOCABULARY,
        stages=integer(row, "pp_stages"),
        forward_seconds=number(row, "T_F_us") * 1e-6,
        backward_seconds=number(row, "T_B_us") * 1e-6,
        weight_seconds=number(row, "T_W_us") * 1e-6,
    )


def _family(row: Row) -> str:
    name = text(row, "schedule").upper()
    if name not in FAMILY_OF:
        raise Unpredictable(f"no schedule is called {name!r}; known are {', '.join(FAMILY_OF)}")
    return FAMILY_OF[name]


def _chunks(model: ProfiledGpt, family: str) -> int:
    """Chunks per rank: the published interleaving has one layer in each."""
    return {"interleaved": model.layers_per_stage, "zb-v": 2}.get(family, 1)


def _equal_chunks(model: ProfiledGpt, family: str) -> list[StageCosts]:
    """The profiled stage everywhere."""
    chunks = _chunks(model, family)
    return [_scaled(middle_stage(model), 1.0 / chunks)] * (model.stages * chunks)


@lru_cache(maxsize=64)
def _schedule(model: ProfiledGpt, family: str, micro_batches: int, send_seconds: float) -> Schedule:
    """As the authors build it: for equal stages with the times of the profiled one."""
    return schedule_for(family, _equal_chunks(model, family), model.stages, micro_batches, send_seconds)


def _published_rate(row: Row) -> float:
    """(cost - m (F + B + W)) / cost for equal stages; the column is the authors' calculation, not a measurement.

    Of interleaved schedules their calculator (efficiency.py of their repository) lets only the first micro-batch of a
    group wait for the transfer between the last rank and the first, which lowers the rates by 0.001 to 0.003.
    """
    model, family, send_seconds = _model_of(row), _family(row), _send_seconds(row)
    chunks = _equal_chunks(model, family)
    schedule = _schedule(model, family, integer(row, "microbatches"), send_seconds)
    if family != "interleaved":
        return play_pipeline(chunks, schedule, send_seconds=send_seconds).bubble_rate
    program = pipeline_program(schedule, stage_programs(chunks), send_seconds=send_seconds)
    timeline = simulate([
        replace(step, depends_on=()) if _wraps(step, model.stages, len(chunks)) else step for step in program
    ])  # fmt: skip
    return 1.0 - timeline.compute_seconds / (model.stages * timeline.makespan_seconds)


def _wraps(step: Action, ranks: int, num_stages: int) -> bool:
    """Waits for the other end of the pipeline, and is not the first of its group."""
    if step.communication:
        return False
    stage, kind, micro_batch = parse_action(step.name)
    boundary = stage if kind == "F" else stage + 1
    from_other_end = boundary % ranks == 0 and 0 < boundary < num_stages
    return from_other_end and micro_batch % ranks != 0


def _step(row: Row, host_seconds: float) -> StepCosts:
    """The step of the model itself; zero-bubble runs validate the optimizer behind the step, the others before it."""
    model, family, send_seconds = _model_of(row), _family(row), _send_seconds(row)
    splits = FAMILIES[family].split_backward
    return play_pipeline(
        [_on_host(stage, host_seconds, splits) for stage in gpt_stages(model, _device(), _chunks(model, family))],
        _schedule(model, family, integer(row, "microbatches"), send_seconds),
        send_seconds=send_seconds,
        step_end="flowing" if splits else "together",
    )


def _send_seconds(row: Row) -> float:
    return number(row, "T_comm_us") * 1e-6


def _device() -> Device:
    return preset_device(DEVICE)


def _on_host(stage: StageCosts, host_seconds: float, splits: bool) -> StageCosts:
    return replace(
        stage,
        forward_seconds=stage.forward_seconds + host_seconds,
        backward_seconds=stage.backward_seconds + host_seconds,
        weight_seconds=stage.weight_seconds + (host_seconds if splits else 0.0),
    )


def _scaled(stage: StageCosts, factor: float) -> StageCosts:
    """The same work cut into equal parts; only the seconds matter."""
    return replace(
        stage,
        forward_seconds=stage.forward_seconds * factor,
        backward_seconds=stage.backward_seconds * factor,
        weight_seconds=stage.weight_seconds * factor,
    )
