"""Stages of a GPT whose middle stage was profiled: costs from the shape and the times of one stage's F, B and W.

A pipeline of p stages deals out layers + 2 slots evenly; the embedding takes the place of a layer on the first stage,
the head that of one on the last. 22 layers on 8 stages of 3 slots:

    embedding, 2 layers | 3 layers | ... | 3 layers | 2 layers, head

Layers take their part of the profiled times; embedding and head are priced from their sizes on the device. Bytes are
those of fp16 training with unfused attention and dropout (Korthikanti, arXiv 2205.05198): a layer keeps
s b (34 h + 5 a s) from F to B, of which the weight gradients need 32 s b h (arXiv 2401.10241, section 2.3).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from autopar.cost_models.stage_costs import StageCosts, joined
from autopar.hardware.devices import Device

ADAM_FP16_BYTES = 16
"""Per parameter: fp16 weight and gradient, fp32 master copy and two moments."""

OPTIMIZER_TRAFFIC_BYTES = 54
"""Read and written per parameter after the last backward: fp32 copy of the gradient (6), unscaling with the check for
infinities (8), norm (4), Adam (28), fp16 copy of the weight (6), zeroed gradient (2)."""

LOGIT_FORWARD_BYTES, LOGIT_BACKWARD_BYTES = 26, 14
"""Read and written per logit by the loss in fp32 on fp16 logits: cast (6), maximum (4), subtraction (8), exponential
and sum (8); backward: scaled softmax (8), cast (6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledGpt:
    """A GPT cut into stages, of which a middle one was timed; seconds are of one micro-batch."""

    layers: int
    hidden: int
    heads: int
    seq_len: int
    micro_batch: int
    vocab: int
    stages: int
    forward_seconds: float
    backward_seconds: float
    weight_seconds: float

    @property
    def slots(self) -> int:
        """Layers, embedding and head."""
        return self.layers + 2

    @property
    def layers_per_stage(self) -> int:
        """Of a middle stage."""
        return max(1, round(self.slots / self.stages))


def middle_stage(model: ProfiledGpt) -> StageCosts:
    """The stage that was profiled: layers only, nothing per step."""
    return replace(joined([_layer(model)] * model.layers_per_stage), once_seconds=0.0)


def gpt_stages(model: ProfiledGpt, device: Device, chunks: int = 1) -> list[StageCosts]:
    """Costs of all stages (ranks times chunks), in the order of the model."""
    layer = _with_optimizer(_layer(model), device)
    parts = [_embedding(model, device), *[layer] * model.layers, _head(model, device)]
    count = model.stages * chunks
    bounds = [model.slots * index // count for index in range(count + 1)]
    return [joined(parts[first:last]) for first, last in itertools.pairwise(bounds)]


def _layer(model: ProfiledGpt) -> StageCosts:
    s, b, h, a = model.seq_len, model.micro_batch, model.hidden, model.heads
    scores = 2 * b * a * s * s
    return StageCosts(
        forward_seconds=model.forward_seconds / model.layers_per_stage,
        backward_seconds=model.backward_seconds / model.layers_per_stage,
        weight_seconds=model.weight_seconds / model.layers_per_stage,
        send_bytes=2 * s * b * h,
        saved_bytes=s * b * (34 * h + 5 * a * s),
        weight_saved_bytes=32 * s * b * h,
        forward_extra_bytes=scores,
        backward_extra_bytes=max(2 * scores, 16 * s * b * h),
        state_bytes=ADAM_FP16_BYTES * (12 * h * h + 13 * h),
    )


def _embedding(model: ProfiledGpt, device: Device) -> StageCosts:
    """Two look-ups, their sum and dropout; W writes and adds a gradient of the whole table."""
    s, b, h = model.seq_len, model.micro_batch, model.hidden
    parameters = (model.vocab + s) * h
    traffic = device.memory_bytes_per_second
    embedding = StageCosts(
        forward_seconds=12 * s * b * h / traffic,
        backward_seconds=6 * s * b * h / traffic,
        weight_seconds=12 * parameters / traffic,
        send_bytes=2 * s * b * h,
        saved_bytes=s * b * h,
        weight_saved_bytes=2 * s * b * h,
        state_bytes=ADAM_FP16_BYTES * parameters,
    )
    return _with_optimizer(embedding, device)


def _head(model: ProfiledGpt, device: Device) -> StageCosts:
    """Last norm, product with the (untied) table, and the loss in fp32; its softmax lives until B."""
    s, b, h = model.seq_len, model.micro_batch, model.hidden
    logits, parameters = s * b * model.vocab, model.vocab * h
    traffic = device.memory_bytes_per_second
    product = 2 * logits * h / device.flops_per_second["float16"]
    head = StageCosts(
        forward_seconds=product + LOGIT_FORWARD_BYTES * logits / traffic,
        backward_seconds=product + LOGIT_BACKWARD_BYTES * logits / traffic,
        weight_seconds=product + 8 * parameters / traffic,
        saved_bytes=4 * logits + 4 * s * b * h,
        weight_saved_bytes=2 * logits + 2 * s * b * h,
        forward_extra_bytes=2 * logits,
        backward_extra_bytes=6 * logits,
        state_bytes=ADAM_FP16_BYTES * parameters,
    )
    return _with_optimizer(head, device)


def _with_optimizer(part: StageCosts, device: Device) -> StageCosts:
    parameters = part.state_bytes / ADAM_FP16_BYTES
    return replace(part, once_seconds=OPTIMIZER_TRAFFIC_BYTES * parameters / device.memory_bytes_per_second)
