"""Model states of one rank: what ZeRO, expert parallelism and the optimizer make of a stage's parameters.

    Adam                     every parameter: master copy and two moments
    Muon                     matrices inside of layers: master copy and one momentum; all others as Adam
    Muon over whole layers   each parameter's optimizer state lies whole on one of the data-parallel ranks

Megatron's layer-wise optimizer sorts parameters by size and hands them out back and forth, p0 .. p3 to ranks 0 .. 3,
p4 .. p7 to ranks 3 .. 0 (megatron/core/optimizer/layer_wise_optimizer.py: ping-pong ownership).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.passes.module_segments import block_path
from benchmarks.validation.allocator import LargeBlocks, rounded_bytes
from benchmarks.validation.model_states import StateDtypes, state_bytes
from benchmarks.validation.program_memory import SegmentMemory
from benchmarks.validation.runs import TrainingRun

EXPERTS = (".gate_up", ".up_weights", ".mlp.down")
"""How the names of stacked expert weights end (`models.py`)."""
MUON_STATE_BYTES = 8
"""float32 master copy and momentum."""
FLOAT32_BYTES = 4


def stage_states(held: Sequence[SegmentMemory], run: TrainingRun) -> float:
    """Bytes of parameters, gradients and optimizer states of the last rank of a stage; `held`: its pieces."""
    plain, routed = parameters(held, run)
    local, degree, expert_degree = _experts_here(routed, run), data_degree(run), _expert_degree(run)
    stack, stage = run.stack, run.parallel.zero_stage
    if run.optimizer.startswith("Muon"):
        return _with_muon(held, run, plain, local)
    dtypes = StateDtypes(
        parameter=stack.parameter_bytes, gradient=stack.gradient_bytes, optimizer=stack.optimizer_bytes
    )
    if run.adapter_rank:
        frozen = StateDtypes(parameter=stack.parameter_bytes, gradient=0, optimizer=0.0)
        whole = state_bytes(plain, frozen, stage, degree) + state_bytes(local, frozen, stage, expert_degree)
        return whole + state_bytes(adapter_elements(held, run), dtypes, stage, degree)
    return state_bytes(plain, dtypes, stage, degree) + state_bytes(local, dtypes, stage, expert_degree)


def adapter_elements(held: Sequence[SegmentMemory], run: TrainingRun) -> int:
    """Of the low-rank matrices beside the four products of each layer that attends and has an MLP (Bridge's LoRA:
    linear_qkv, linear_proj, linear_fc1, linear_fc2; experts share one pair)."""
    shape, tp = run.model, run.parallel.tp
    head = shape.head_dim or shape.hidden // shape.heads
    inside = head * (2 * shape.heads + 2 * shape.kv_heads) + 3 * shape.ffn
    layers = sum(block_path(f"{piece.name}/") is not None for piece in held)
    return layers * run.adapter_rank * (4 * shape.hidden + inside // tp)


def widened_bytes(held: Sequence[SegmentMemory], run: TrainingRun) -> float:
    """float32 copies that an optimizer makes for its step.

    Of 16-bit gradients: Megatron's, dropped before the next forward (megatron/core/optimizer/optimizer.py:
    `_copy_model_grads_to_main_grads`). Of both moments, where Transformer Engine's Adam keeps them in 16 bits: for all
    parameters of a group at once (transformer_engine/pytorch/optimizers/fused_adam.py: `get_unscaled_state` in
    `step`); experts have an optimizer of their own, so the larger group counts.
    """
    if run.stack.kernels != "megatron" or run.stack.gradient_bytes >= FLOAT32_BYTES or run.adapter_rank:
        return 0.0
    plain, routed = parameters(held, run)
    is_cut = run.parallel.zero_stage >= 1
    whole = plain / (data_degree(run) if is_cut else 1)
    experts = _experts_here(routed, run) / (_expert_degree(run) if is_cut else 1)
    if run.stack.precision_aware:
        return 2 * FLOAT32_BYTES * max(whole, experts)
    return FLOAT32_BYTES * (whole + experts)


def transposed_bytes(held: Sequence[SegmentMemory], run: TrainingRun) -> float:
    """float8 copies of the weights of layers in the other order, which Hopper's products of gradients read
    (transformer_engine/pytorch/tensor/float8_tensor.py: `_transpose`; layers but not the head compute in float8). Those
    of experts are not there between the steps of Megatron's tests."""
    if not run.stack.keeps_transposes or run.stack.dtype != "float8":
        return 0.0
    plain, _ = parameters([piece for piece in held if block_path(f"{piece.name}/") is not None], run)
    return float(plain)


def blocks_beyond_states(held: Sequence[SegmentMemory], run: TrainingRun) -> float:
    """What the allocator's blocks of parameters and optimizer states hold beyond the requests, where each parameter has
    tensors of its own: Megatron without distributed optimizer. Gradients are one buffer. Moments are made after the
    first backward, in the segments of its activations."""
    stack = run.stack
    if stack.kernels != "megatron" or run.parallel.zero_stage or run.optimizer != "AdamW" or run.adapter_rank:
        return 0.0
    sizes = list(_tensors(held, run))
    master = stack.optimizer_bytes > 2 * FLOAT32_BYTES
    blocks = LargeBlocks()
    made = [size * stack.parameter_bytes for size in sizes]
    made += [sum(sizes) * stack.gradient_bytes, *(size * FLOAT32_BYTES for size in sizes if master)]
    moments = [size * FLOAT32_BYTES for size in sizes for _ in range(2)]
    counted = sum(blocks.take(request) for request in made)
    blocks.give_back(size for piece in held for size in piece.saved_sizes)
    counted += sum(blocks.take(request) for request in moments)
    return counted - sum(rounded_bytes(request) for request in (*made, *moments))


def _tensors(held: Sequence[SegmentMemory], run: TrainingRun) -> Iterator[float]:
    """Elements of every parameter's tensor; experts have one each."""
    for piece in held:
        for name, elements in piece.parameters.items():
            if run.model.experts is None or not name.endswith(EXPERTS):
                yield elements
                continue
            count = max(1, run.model.experts.count // run.parallel.ep)
            yield from [_experts_here(elements, run) / count] * count


def parameters(held: Sequence[SegmentMemory], run: TrainingRun) -> tuple[int, int]:
    """Elements on one tensor-parallel rank: all but stacked experts, and those of all experts."""
    routed = sum(
        elements
        for piece in held
        for name, elements in piece.parameters.items()
        if run.model.experts is not None and name.endswith(EXPERTS)
    )
    return sum(piece.parameter_elements for piece in held) - routed, routed


def data_degree(run: TrainingRun) -> int:
    """Ranks over which ZeRO cuts what experts do not hold."""
    return run.parallel.zero_degree or run.parallel.dp * run.parallel.cp


def _experts_here(routed: int, run: TrainingRun) -> float:
    """Of `routed` elements of all experts, which tensor parallelism of the model cuts, those of one rank."""
    parallel = run.parallel
    ep = parallel.ep if run.model.experts is not None else 1
    return routed * parallel.tp / (ep * (parallel.expert_tp or parallel.tp))


def _expert_degree(run: TrainingRun) -> int:
    parallel = run.parallel
    ep = parallel.ep if run.model.experts is not None else 1
    return max(1, data_degree(run) * parallel.tp // (ep * (parallel.expert_tp or parallel.tp)))


def _with_muon(held: Sequence[SegmentMemory], run: TrainingRun, plain: int, local: float) -> float:
    stack, degree = run.stack, data_degree(run)
    weights = (plain + local) * (stack.parameter_bytes + stack.gradient_bytes)
    sized = list(_optimizer_bytes(held, run))
    if run.optimizer == "Muon by layers":
        dense = sum(size for _, size in _of_last_rank(sized, degree))
    else:
        dense = sum(size for _, size in sized) / (degree if run.parallel.zero_stage else 1)
    cut = _expert_degree(run) if run.parallel.zero_stage else 1
    return weights + dense + local * MUON_STATE_BYTES / cut


def _optimizer_bytes(held: Sequence[SegmentMemory], run: TrainingRun) -> Iterator[tuple[int, float]]:
    """(elements, bytes of optimizer state) of every parameter but those of experts."""
    for piece in held:
        for name, elements in piece.parameters.items():
            if name.endswith(EXPERTS) and run.model.experts is not None:
                continue
            is_matrix = block_path(f"{name}/") is not None and name.endswith("weight") and ".norm" not in name
            yield elements, elements * (MUON_STATE_BYTES if is_matrix else run.stack.optimizer_bytes)


def _of_last_rank(sized: Sequence[tuple[int, float]], ranks: int) -> Iterator[tuple[int, float]]:
    for index, entry in enumerate(sorted(sized)):
        turn = index % (2 * ranks)
        if min(turn, 2 * ranks - 1 - turn) == ranks - 1:
            yield entry
