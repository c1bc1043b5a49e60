"""What one model chunk on one device costs per micro-batch and per step: the parts that a pipeline is built from.

A pipeline of equal stages of 2 s forward and 4 s backward that hand on 8 MiB and keep 100 MiB per micro-batch:

    stages = [StageCosts(forward_seconds=2.0, backward_seconds=4.0, send_bytes=8 << 20, saved_bytes=100 << 20)] * 4

Bytes of one micro-batch over time: `forward_extra_bytes` come and go within F; `saved_bytes` live from the start of F
to the end of B; `backward_extra_bytes` come and go within B; where the weight gradients are computed apart (W),
`weight_saved_bytes` live from the end of B to the end of W. A whole backward drops what both read as it goes, so that
`whole_extra_bytes` may come and go within it, fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from autopar.errors import ConfigurationError
from autopar.hardware.devices import Device

PASS_LAUNCHES = 16.0
"""What a pass of a stage costs its CPU beside its operators, in dispatches of a small operator: binding its arguments,
a message that comes and one that leaves. Measured: 0.2 to 0.3 CPU ms per pass of GPTs of 4 layers, 4 emulated nodes of
half a core each, where a dispatch takes 0.016 CPU ms."""


def host_pass_seconds(device: Device) -> float:
    """Seconds of a pass that hands on, beside its operators; 0 where the host runs ahead of its device."""
    return PASS_LAUNCHES * device.launch_seconds if device.kind == "cpu" else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds and bytes of one model chunk on one device, for one micro-batch unless said otherwise."""

    forward_seconds: float
    backward_seconds: float
    """Gradients of the inputs; those of the weights too, where `weight_seconds` is 0."""
    weight_seconds: float = 0.0
    """Gradients of the weights, where they are computed apart; a schedule that does not split adds them to B."""
    send_bytes: float = 0.0
    """The activation handed to the next stage; its gradient comes back in as many bytes."""
    saved_bytes: float = 0.0
    """ProgramCache from F to B."""
    weight_saved_bytes: float = 0.0
    """ProgramCache from B to W."""
    forward_extra_bytes: float = 0.0
    """Transient peak of F beyond `saved_bytes`."""
    backward_extra_bytes: float = 0.0
    """Transient peak of B beyond `saved_bytes`."""
    whole_extra_bytes: float | None = None
    """The same where B computes the gradients of the weights too; None: as many."""
    state_bytes: float = 0.0
    """Parameters, gradients and optimizer states; live throughout."""
    update_bytes: float = 0.0
    """What the optimizer's step takes for a while, behind all passes."""
    last_seconds: float = 0.0
    """What the last pass of backward takes longer than others, by what runs beside it."""
    once_seconds: float = 0.0
    """Per step, after the last backward: gradient reduction, clipping, optimizer, parameter gather."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value >= 0:
                raise ConfigurationError(f"{field.name} of a stage is {value}: at least 0")

    @property
    def compute_seconds(self) -> float:
        """Forward and whole backward of one micro-batch."""
        return self.forward_seconds + self.backward_seconds + self.weight_seconds

    @property
    def extra_of_whole_backward(self) -> float:
        """Transient peak of a B that computes the gradients of the weights too."""
        return self.backward_extra_bytes if self.whole_extra_bytes is None else self.whole_extra_bytes


def joined(chunks: Sequence[StageCosts]) -> StageCosts:
    """Return the costs of consecutive chunks that run as one, such as the layers of a stage.

    Seconds, saved bytes and states add up; of transients the largest counts (the chunks run one after another); the
    last one sends. Raises ConfigurationError for no chunk.
    """
    if not chunks:
        raise ConfigurationError("a stage needs at least one chunk")
    return StageCosts(
        forward_seconds=sum(chunk.forward_seconds for chunk in chunks),
        backward_seconds=sum(chunk.backward_seconds for chunk in chunks),
        weight_seconds=sum(chunk.weight_seconds for chunk in chunks),
        send_bytes=chunks[-1].send_bytes,
        saved_bytes=sum(chunk.saved_bytes for chunk in chunks),
        weight_saved_bytes=sum(chunk.weight_saved_bytes for chunk in chunks),
        forward_extra_bytes=max(chunk.forward_extra_bytes for chunk in chunks),
        backward_extra_bytes=max(chunk.backward_extra_bytes for chunk in chunks),
        whole_extra_bytes=max(chunk.extra_of_whole_backward for chunk in chunks),
        state_bytes=sum(chunk.state_bytes for chunk in chunks),
        update_bytes=sum(chunk.update_bytes for chunk in chunks),
        last_seconds=sum(chunk.last_seconds for chunk in chunks),
        once_seconds=sum(chunk.once_seconds for chunk in chunks),
    )
