"""Parameters and model FLOPs of a shape by closed formula: what publishers divide by, and where a naive model starts.

    parameters(shape).total                      # all, with embeddings
    model_flops(run)                             # 6 x active parameters x tokens + attention, per step

These are never part of a prediction of time or memory; those come from the captured program.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.validation.runs import ModelShape, TrainingRun


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts of elements."""

    embedding: int
    """Words, once; an untied output projection has as many again in `head`."""
    head: int
    layers: int
    active_layers: int
    """Of `layers`, those that one token passes (experts that are chosen)."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.head + self.layers


def parameters(shape: ModelShape) -> Parameters:
    """Weight matrices of a shape; norms and biases, below 0.1 %, are left out."""
    words = shape.vocab * shape.hidden
    learned = shape.seq_len * shape.hidden if shape.family in ("gpt", "bert") else 0
    stored = active = 0
    for kind, count in _layer_counts(shape):
        one_stored, one_active = _layer(shape, kind)
        stored, active = stored + count * one_stored, active + count * one_active
    return Parameters(words + learned, 0 if shape.tied_embeddings else words, stored, active)


def _layer_counts(shape: ModelShape) -> list[tuple[str, int]]:
    """(kind, how many); a letter of a hybrid pattern is one kind."""
    if shape.pattern:
        return [(letter, shape.pattern.count(letter)) for letter in sorted(set(shape.pattern))]
    extra, decoders = shape.extra_predictions, shape.layers if shape.decoder_seq_len else 0
    if shape.experts is None:
        return [("layer", shape.layers + extra), ("decoder", decoders)]
    routed = len(range(shape.experts.dense_layers, shape.layers, shape.experts.every))
    return [("layer", shape.layers - routed), ("expert layer", routed + extra)]


def _layer(shape: ModelShape, kind: str) -> tuple[int, int]:
    """Elements of one layer: stored, and used by one token."""
    attention, dense = _attention(shape), _mlp(shape, shape.ffn)
    stored, active = _experts(shape)
    return {
        "layer": (attention + dense, attention + dense),
        "decoder": (2 * attention + dense, 2 * attention + dense),
        "expert layer": (attention + stored, attention + active),
        "M": (_state_space(shape), _state_space(shape)),
        "*": (attention, attention),
        "-": (dense, dense),
        "E": (stored, active),
    }[kind]


def _attention(shape: ModelShape) -> int:
    latent = shape.latent
    if latent is None:
        head = shape.head_dim or shape.hidden // shape.heads
        return 2 * shape.hidden * head * (shape.heads + shape.kv_heads)
    query = shape.heads * (latent.nope_head + latent.rope_head)
    down = latent.query_rank * (shape.hidden + query) if latent.query_rank else shape.hidden * query
    keys = shape.hidden * (latent.key_value_rank + latent.rope_head)
    up = latent.key_value_rank * shape.heads * (latent.nope_head + latent.value_head)
    return down + keys + up + shape.heads * latent.value_head * shape.hidden


def _mlp(shape: ModelShape, width: int) -> int:
    return (3 if shape.gated or shape.family in ("llama", "moe") else 2) * shape.hidden * width


def _experts(shape: ModelShape) -> tuple[int, int]:
    experts = shape.experts
    if experts is None:
        return 0, 0
    one, shared = _mlp(shape, experts.hidden), _mlp(shape, experts.shared_hidden)
    router = shape.hidden * experts.count
    return router + experts.count * one + shared, router + experts.per_token * one + shared


def _state_space(shape: ModelShape) -> int:
    space = shape.state_space
    if space is None:
        return 0
    inner = space.heads * space.head_dim
    return shape.hidden * (2 * inner + 2 * space.groups * space.state + space.heads) + inner * shape.hidden


def attention_flops(shape: ModelShape) -> float:
    """FLOPs of scores and weighted values of one sequence, forward, over all positions (no causal half)."""
    latent = shape.latent
    head = shape.head_dim or shape.hidden // shape.heads
    width = 2 * head if latent is None else latent.nope_head + latent.rope_head + latent.value_head
    layers = shape.pattern.count("*") if shape.pattern else shape.layers + shape.extra_predictions
    return 2.0 * layers * shape.heads * width * shape.seq_len**2


def model_flops(run: TrainingRun) -> float:
    """FLOPs of a step as publishers count them: 6 x active parameters x tokens, attention thrice, nothing twice."""
    counted = parameters(run.model)
    per_token = counted.active_layers + run.model.vocab * run.model.hidden * (1 + run.model.extra_predictions)
    sequences = run.parallel.global_batch
    passes = 3 if run.training else 1
    tokens = sequences * run.model.seq_len
    return passes * (2.0 * per_token * tokens + sequences * attention_flops(run.model))
