"""The two graphs of one rank: forward, and backward with what it takes of forward.

    forward(inputs)           -> mutations, outputs, saved values
    backward(saved, tangents) -> gradients

`passes/lowering/step_halves.py` makes them of one graph; overlap and micro-batches rewrite them; prices and live ranges
read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A value that forward hands to backward; inputs (parameters among them) cost no memory of their own. on_host: it
    waits there."""

    name: str
    bytes: int
    is_input: bool
    on_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The two graphs of one rank; `backward` is None for a program without gradients. `parameters`: names of the
    forward placeholders that are parameters."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[SavedTensor, ...]
    parameters: frozenset[str]

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """Forward, and backward where there is one."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def saved_bytes(self) -> int:
        """Bytes of what is saved on the device, without inputs."""
        return sum(value.bytes for value in self.saved if not (value.is_input or value.on_host))
