"""Peak bytes of a published run: its lowered program segment by segment, composed to stages, played over the schedule.

    stage of 2 layers, 3 micro-batches in flight:   states + 3 x 2 x saved(layer) + extra(layer) + workspaces

The program is lowered for one tensor-parallel rank with one micro-batch; context parallelism computes on a shorter
sequence, expert parallelism holds fewer experts but as many rows. What the software holds beside that are the facts of
`stack_memory.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.schedule_player import play_pipeline
from autopar.cost_models.stage_costs import StageCosts
from autopar.errors import ConfigurationError
from autopar.passes.module_segments import block_path, segment_of
from autopar.schedules.list_scheduler import build_schedule
from benchmarks.validation.bert_memory import layer_mask_bytes, untold_bytes
from benchmarks.validation.galvatron_memory import (
    galvatron_kept_bytes,
    gathers_by_piece,
    handed_on_bytes,
    narrower_norm_bytes,
    with_gathered,
)
from benchmarks.validation.lowered import LoweredRun, lowered
from benchmarks.validation.offloaded_memory import beside_neighbour, unclaimed_bytes, waits_in_host_memory
from benchmarks.validation.prediction_memory import further_prediction
from benchmarks.validation.program_memory import SegmentMemory, measure_segments
from benchmarks.validation.recomputation import computed_again
from benchmarks.validation.runs import TrainingRun
from benchmarks.validation.schemas import Tier
from benchmarks.validation.stack_memory import (
    EXPERT_IMBALANCE,
    RESERVED_FRACTION,
    StackFacts,
    attention_output_bytes,
    bucket_bytes,
    deferred_bytes,
    dispatched_bytes,
    encoded_bytes,
    facts_of,
    gathered_bytes,
    gathered_input_bytes,
    gathered_sequence_bytes,
    gathered_tokens_bytes,
    kept_projections,
    kept_scores_bytes,
    leftover_bytes,
    library_bytes,
    mask_bytes,
    router_bytes,
    unsplit_queries_bytes,
)
from benchmarks.validation.state_memory import blocks_beyond_states, stage_states, transposed_bytes, widened_bytes
from benchmarks.validation.state_space_memory import with_fused_scan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of the ranks of one pipeline stage."""

    states: float
    """Parameters, gradients and optimizer states."""
    workspaces: float
    """Of libraries, handed out once by torch's allocator."""
    leftovers: float
    """What lies around between steps: the batch, buffers of the pipeline."""
    gathered: float
    """Whole weights and gradients of layers that ZeRO-3 keeps cut, and its buckets."""
    activations: float
    """Most that micro-batches hold at once."""
    saved: float
    """What forward of one micro-batch leaves for backward, on all chunks of the rank."""
    widened: float
    """float32 copies of gradients, from the optimizer's step to the next forward."""
    block_states: float
    """Of `states`, those of blocks: without embedding and head."""
    block_saved: float
    """Most that blocks keep from forward to backward for all micro-batches in flight."""

    @property
    def between_steps(self) -> float:
        """`torch.cuda.memory_allocated` after a step."""
        return self._held + self.widened

    @property
    def peak(self) -> float:
        """`torch.cuda.max_memory_allocated`."""
        return self._held + max(self.gathered + self.activations, self.widened)

    @property
    def _held(self) -> float:
        return self.states + self.workspaces + self.leftovers

    @property
    def reserved(self) -> float:
        """`torch.cuda.max_memory_reserved` without expandable segments."""
        return self.peak * (1.0 + RESERVED_FRACTION)


def peak_bytes(run: TrainingRun, tier: Tier) -> float:
    """max_memory_allocated of the fullest rank. Raises ConfigurationError for a run that cannot be expressed."""
    return max(rank.peak for rank in ranks(run, tier))


def ranks(run: TrainingRun, tier: Tier) -> tuple[RankMemory, ...]:
    """The memory of every pipeline stage's rank; the tier "physics" leaves out what was fitted."""
    return tuple(_Measured(run, tier).ranks())


class _Measured:
    """The segments of one run and how its stages are made of them."""

    def __init__(self, run: TrainingRun, tier: Tier) -> None:
        if run.model.family == "hybrid" and run.model.extra_predictions:
            raise ConfigurationError("what the further predictions of a hybrid hold is not modelled")
        self._run, self._facts, self._tier = run, facts_of(run), tier
        low = lowered(on_one_replica(run))
        again = computed_again(low.plan.operators, run.parallel)
        segments = {
            name: with_fused_scan(piece, run) for name, piece in _measured(_ById(low), again, self._facts).items()
        }
        if self._facts.offloads:
            here = _measured(_ById(low), again, replace(self._facts, offloads=False))
            routed = _routed_bytes(run, tier)
            segments = {
                name: beside_neighbour(piece, here[name], run, routed if _has_experts(piece) else 0)
                if _is_block(piece)
                else piece
                for name, piece in segments.items()
            }
        self._segments = with_facts(segments, run, self._facts, tier)
        if gathers_by_piece(run):
            self._segments = {name: with_gathered(piece, run) for name, piece in self._segments.items()}
        self._chunks = [[self._segments[name] for name in chunk] for chunk in low.chunks]
        if run.model.extra_predictions:
            *_, block = (piece for chunk in self._chunks for piece in chunk if _is_block(piece))
            head = self._chunks[-1].pop()
            self._chunks[-1] += [*further_prediction(block, head, run) * run.model.extra_predictions, head]

    def ranks(self) -> Iterator[RankMemory]:
        """Every stage's memory, first to last."""
        run, pp = self._run, self._run.parallel.pp
        stages = [stage_bytes(chunk) for chunk in self._chunks]
        kept = [StageCosts(forward_seconds=1.0, backward_seconds=2.0, saved_bytes=_saved(c)) for c in self._chunks]
        peaks = zip(activation_peaks(stages, run), activation_peaks(kept, run), strict=True)
        for rank, (activations, block_saved) in enumerate(peaks):
            held = [piece for chunk in self._chunks[rank::pp] for piece in chunk]
            waiting = deferred_bytes(run) if rank == pp - 1 else handed_on_bytes(run)
            border = max((piece.border_bytes for piece in held), default=0)
            yield RankMemory(
                states=stage_states(held, run) + transposed_bytes(held, run),
                workspaces=_workspaces(run),
                leftovers=leftover_bytes(run, border) + blocks_beyond_states(held, run) + unclaimed_bytes(held, run),
                gathered=self._gathered(held),
                activations=activations + waiting + mask_bytes(run) + untold_bytes(run),
                widened=widened_bytes(held, run),
                saved=sum(piece.saved_bytes for piece in held) + (handed_on_bytes(run) if rank < pp - 1 else 0),
                block_states=stage_states([piece for piece in held if _is_block(piece)], run),
                block_saved=block_saved,
            )

    def _gathered(self, held: Sequence[SegmentMemory]) -> float:
        if gathers_by_piece(self._run):
            return 0.0
        sizes = [piece.parameter_elements for piece in held]
        return gathered_bytes(self._run, sizes) + bucket_bytes(self._run)


def _workspaces(run: TrainingRun) -> int:
    """What libraries and stacks hold from the first step on."""
    buffers = gathered_tokens_bytes(run) + gathered_sequence_bytes(run) + kept_scores_bytes(run)
    return library_bytes(run) + buffers


def _is_block(piece: SegmentMemory) -> bool:
    return block_path(f"{piece.name}/") is not None


def _saved(chunk: Sequence[SegmentMemory]) -> float:
    """What the blocks of a chunk keep for one micro-batch."""
    return sum(piece.saved_bytes for piece in chunk if _is_block(piece))


def stage_bytes(chunk: Sequence[SegmentMemory]) -> StageCosts:
    """A model chunk's bytes per micro-batch: transients at the fullest moment of a walk through its pieces."""
    saved = sum(piece.saved_bytes for piece in chunk)
    held, forward, backward = 0, 0, 0
    for piece in chunk:
        held += piece.saved_bytes
        forward = max(forward, held + piece.forward_extra_bytes)
        backward = max(backward, held + piece.backward_extra_bytes)
    return StageCosts(
        forward_seconds=1.0,
        backward_seconds=2.0,
        saved_bytes=saved,
        forward_extra_bytes=max(0, forward - saved),
        backward_extra_bytes=max(0, backward - saved),
    )


def activation_peaks(stages: Sequence[StageCosts], run: TrainingRun) -> tuple[float, ...]:
    """Most bytes that micro-batches hold on each rank; more micro-batches than fill the pipeline twice add none."""
    parallel = run.parallel
    chunks = len(stages) // parallel.pp
    count = min(parallel.micro_batches, 2 * parallel.pp * chunks)
    family = parallel.schedule if parallel.pp > 1 else "1f1b"
    schedule = build_schedule(family, parallel.pp, count, chunks)
    return play_pipeline(stages, schedule).peak_bytes


def on_one_replica(run: TrainingRun) -> TrainingRun:
    """The run as one replica sees it: its part of the sequence, no data and no expert parallelism."""
    parallel = replace(
        run.parallel, dp=1, cp=1, ep=1, expert_tp=0, zero_stage=0, zero_degree=0, micro_batches=1, recompute="none"
    )
    model = replace(run.model, seq_len=run.model.seq_len // run.parallel.cp)
    return replace(run, model=model, parallel=parallel)


def with_facts(
    segments: Mapping[str, SegmentMemory], run: TrainingRun, facts: StackFacts, tier: Tier
) -> Mapping[str, SegmentMemory]:
    """Segments with what the stack saves beside the graph."""
    more = kept_projections(run) + galvatron_kept_bytes(run)
    attended = layer_mask_bytes(run) if run.parallel.recompute != "full" else 0
    if run.parallel.recompute != "full" and not facts.offloads:
        attended += attention_output_bytes(run) if facts.copies_attention_output else 0
        attended -= unsplit_queries_bytes(run)
    routed = router_bytes(run) + (0 if facts.offloads else _routed_bytes(run, tier))
    encoded = encoded_bytes(run) if run.parallel.recompute != "full" else 0
    found = {}
    for name, segment in segments.items():
        kept, extra = segment.saved_bytes, segment.forward_extra_bytes
        if _is_block(segment):
            kept += more + (attended if _attends(segment) else 0)
            kept += (routed if _has_experts(segment) else 0) - (encoded if _is_decoder(segment) else 0)
        elif name == "head":  # what all layers of a decoder read is there once
            kept += encoded - narrower_norm_bytes(run) + gathered_input_bytes(run)
            extra += facts.benchmark_bytes
        found[name] = replace(segment, saved_bytes=kept, forward_extra_bytes=extra)
    return found


def _routed_bytes(run: TrainingRun, tier: Tier) -> int:
    """What a layer of experts saves beyond the graph on the fullest rank."""
    if run.model.experts is None or run.stack.kernels != "megatron":
        return 0
    imbalance = EXPERT_IMBALANCE if tier != "physics" else 1.0
    return round(dispatched_bytes(run, run.model.experts, imbalance))


def _attends(piece: SegmentMemory) -> bool:
    """All layers but other mixers of a hybrid."""
    return any(".attention." in name for name in piece.parameters)


def _is_decoder(piece: SegmentMemory) -> bool:
    return any(".cross." in name for name in piece.parameters)


def _has_experts(piece: SegmentMemory) -> bool:
    return any(".mlp.router" in name for name in piece.parameters)


class _ById:
    """A lowered run as a key: `lowered` hands out the same programs for equal questions."""

    def __init__(self, low: LoweredRun) -> None:
        self.low = low
        self._key = (id(low.program), id(low.partition))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self._key == other._key


@functools.lru_cache(maxsize=256)
def _measured(key: _ById, again: frozenset[str], facts: StackFacts) -> Mapping[str, SegmentMemory]:
    return measure_segments(
        key.low.program,
        segment_of,
        recompute=again,
        fused=facts.fused,
        in_place_gradients=facts.in_place_gradients,
        loss=facts.loss,
        leaves=waits_in_host_memory if facts.offloads else None,
    )
