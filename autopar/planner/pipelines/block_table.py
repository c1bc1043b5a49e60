"""Block tables: what every block of a model costs on one shape of sub-mesh; a stage is a run of blocks.

    blocks    0 embedding   1 layers.0   2 layers.1   3 head        border b lies behind block b
    stage     table.stage(1, 3, 0) = layers.0 and layers.1, nothing recomputed: sums of seconds, saved bytes and states,
              the largest transient, and the bytes that border 2 hands on

Rows of the two-dimensional arrays are ways of recomputation. Seconds and bytes are those of one micro-batch
on the fullest device of the sub-mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.stage_costs import StageCosts
from autopar.errors import ConfigurationError
from autopar.request.constraints import Recompute

Floats = NDArray[np.float64]
MODES = ("none", "selective", "full")
"""Ways of recomputation."""
HOST_MODES = ("saved on host", "borders on host")
"""Ways in which what forward saves waits on the host: of "none", and of "full"."""
RECOMPUTE_OF: Mapping[str, Recompute] = {
    "none": "none",
    "selective": "selective",
    "full": "full",
    "saved on host": "none",
    "borders on host": "full",
}
"""What a way of a stage computes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """seconds: from every stage to the next; near: the borders that lie inside of a node, by number."""

    seconds: tuple[float, ...]
    near: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockTable:
    """Costs of N blocks under R ways of recomputation, on sub-meshes of `devices` devices of the device group `group`.

    Arrays are (R, N), but for state_bytes and once_seconds (N,) and those of borders (N - 1,). send_seconds: of the
    activation over a border, one way. update_bytes, (N,): of the optimizer's step, None counts as 0. parameter_bytes
    and twin_seconds, (N,): a block's parameters, and adding up their gradients over two rank groups that both hold it;
    None counts as 0. across_seconds, (N - 1,): as send_seconds, where the next stage stands on another device group;
    None: the same. near_seconds, (N - 1,): as send_seconds, between two of the `groups_per_node` rank groups of a node.
    capacity_bytes: what one device holds. Raises ConfigurationError for other shapes and for costs that are negative or
    not finite.
    """

    name: str
    devices: int
    capacity_bytes: float
    forward_seconds: Floats
    backward_seconds: Floats
    weight_seconds: Floats
    saved_bytes: Floats
    weight_saved_bytes: Floats
    forward_extra_bytes: Floats
    backward_extra_bytes: Floats
    state_bytes: Floats
    once_seconds: Floats
    send_bytes: Floats
    send_seconds: Floats
    whole_extra_bytes: Floats | None = None
    """(R, N) `backward_extra_bytes` where backward is not split, so that what W reads goes once it is read; None: as
    many."""
    arrived_bytes: Floats | None = None
    """(R, N - 1), None counts as 0: of what crosses a border, what the stage behind it keeps too, beside a block in
    front that counts it."""
    handed_bytes: Floats | None = None
    """(R, N - 1), None counts as 0: of what the block in front of a border counts, what a stage that ends there does
    not keep, as backward reads it in the stage behind."""
    update_bytes: Floats | None = None
    parameter_bytes: Floats | None = None
    twin_seconds: Floats | None = None
    across_seconds: Floats | None = None
    near_seconds: Floats | None = None
    groups_per_node: int = 1
    shared: tuple[tuple[tuple[int, ...], float], ...] = ()
    """(blocks that read one parameter, seconds of adding up its gradients over two stages), once per step."""
    group: int = 0
    host_bytes: Floats | None = None
    """(R, N) that wait on the host; None counts as 0."""
    host_capacity_bytes: float = math.inf
    """What one device may fill of the host's memory."""
    ahead_bytes: float = 0.0
    """For copies to the host and back that are under way, where something waits there; counted in the extra bytes."""
    gather_once: bool = False
    """Stages gather their parameters once per step."""
    pass_seconds: float = 0.0
    """What the host adds to a pass of a stage of any size: forward, and backward or its first half."""
    modes: tuple[str, ...] = MODES
    """The way of recomputation of every row."""

    def __post_init__(self) -> None:
        shape = self.forward_seconds.shape
        if len(shape) != 2 or not shape[0] or not shape[1] or self.devices < 1:
            raise ConfigurationError(f"block table {self.name}: shape {shape}, {self.devices} devices; at least 1 each")
        if len(self.modes) != shape[0]:
            raise ConfigurationError(f"block table {self.name}: {shape[0]} rows for the modes {self.modes}")
        wanted = {
            **{
                name: shape[1:]
                for name in ("update_bytes", "parameter_bytes", "twin_seconds")
                if getattr(self, name) is not None
            },
            **dict.fromkeys(_BY_MODE, shape),
            **{name: shape for name in ("host_bytes", "whole_extra_bytes") if getattr(self, name) is not None},
            **{
                name: (shape[0], shape[1] - 1)
                for name in ("arrived_bytes", "handed_bytes")
                if getattr(self, name) is not None
            },
            **dict.fromkeys(("state_bytes", "once_seconds"), shape[1:]),
            **dict.fromkeys(("send_bytes", "send_seconds"), (shape[1] - 1,)),
            **{
                name: (shape[1] - 1,)
                for name in ("across_seconds", "near_seconds")
                if getattr(self, name) is not None
            },
        }
        for name, expected in wanted.items():
            found: Floats = getattr(self, name)
            if found.shape != expected:
                raise ConfigurationError(f"block table {self.name}: {name} has shape {found.shape}, not {expected}")
            if not (np.isfinite(found) & (found >= 0)).all():
                raise ConfigurationError(f"block table {self.name}: {name} must be finite and at least 0")

    @property
    def num_blocks(self) -> int:
        """Blocks that stages are cut of."""
        return int(self.forward_seconds.shape[1])

    @property
    def seconds(self) -> Floats:
        """(R, N) forward and whole backward."""
        return np.asarray(self.forward_seconds + self.backward_seconds + self.weight_seconds)

    def sends_to(self, group: int) -> Floats:
        """(N - 1,) seconds over every border to a stage on a device group."""
        return self.send_seconds if group == self.group or self.across_seconds is None else self.across_seconds

    def borders(self, ends: Sequence[int], route: Sequence[int]) -> Borders:
        """Between stages that end in front of these blocks. route: the rank group of every stage."""
        nodes = [group // self.groups_per_node for group in route]
        near = frozenset(edge for edge, (node, other) in enumerate(itertools.pairwise(nodes)) if node == other)
        inside = self.send_seconds if self.near_seconds is None else self.near_seconds
        return Borders(
            seconds=tuple(
                float((inside if edge in near else self.send_seconds)[end - 1]) for edge, end in enumerate(ends)
            ),
            near=near,
        )

    def on_device(self) -> BlockTable | None:
        """The ways in which nothing waits on the host, where these are some of all."""
        rows = [row for row, mode in enumerate(self.modes) if mode not in HOST_MODES]
        if not 0 < len(rows) < len(self.modes):
            return None
        also = ("whole_extra_bytes", "arrived_bytes", "handed_bytes", "host_bytes")
        arrays = {name: getattr(self, name) for name in (*_BY_MODE, *also)}
        kept = {name: array[rows] for name, array in arrays.items() if array is not None}
        return replace(self, modes=tuple(self.modes[row] for row in rows), **kept)

    def waiting_bytes(self, first: int, end: int, mode: int) -> float:
        """What the blocks first .. end - 1 let wait on the host, of a micro-batch."""
        return 0.0 if self.host_bytes is None else float(self.host_bytes[mode, first:end].sum())

    def with_copies(self, count: int) -> BlockTable:
        """The same blocks with so many more copies of their parameters."""
        if self.parameter_bytes is None:
            return self
        return replace(self, state_bytes=self.state_bytes + count * self.parameter_bytes)

    def with_whole_backward(self) -> BlockTable:
        """The same blocks where no backward is split: for a search that knows one kind of it only."""
        if self.whole_extra_bytes is None:
            return self
        none_kept = np.zeros_like(self.weight_saved_bytes)
        return replace(self, backward_extra_bytes=self.whole_extra_bytes, weight_saved_bytes=none_kept)

    def with_shares(self, micro_batches: int) -> BlockTable:
        """The same blocks, with each micro-batch's share of what is done once per step: for a search that counts
        micro-batches only."""
        return replace(self, weight_seconds=self.weight_seconds + self.once_seconds / micro_batches)

    def stage(self, first: int, end: int, mode: int, *, twins: bool = False) -> StageCosts:
        """Costs of the blocks first .. end - 1 as one stage, all recomputed in one way. twins: on two rank groups."""
        run = slice(first, end)
        added = float(self.twin_seconds[run].sum()) if twins and self.twin_seconds is not None else 0.0
        handed = float(self.handed(mode)[end - 1])
        return StageCosts(
            forward_seconds=float(self.forward_seconds[mode, run].sum()) + self.pass_seconds,
            backward_seconds=float(self.backward_seconds[mode, run].sum()) + self.pass_seconds,
            weight_seconds=float(self.weight_seconds[mode, run].sum()),
            send_bytes=float(self.send_bytes[end - 1]) if end < self.num_blocks else 0.0,
            saved_bytes=float(self.saved_bytes[mode, run].sum() + self.arrived(mode)[first] - handed),
            weight_saved_bytes=float(self.weight_saved_bytes[mode, run].sum()),
            forward_extra_bytes=float(self._beside(self.forward_extra_bytes, self.saved_bytes, mode, run)),
            backward_extra_bytes=float(self._beside(self.backward_extra_bytes, self.freed_bytes, mode, run)) + handed,
            whole_extra_bytes=None
            if self.whole_extra_bytes is None
            else float(self._beside(self.whole_extra_bytes, self.saved_bytes, mode, run)) + handed,
            state_bytes=float(self.state_bytes[run].sum()),
            update_bytes=0.0 if self.update_bytes is None else float(self.update_bytes[run].sum()),
            once_seconds=float(self.once_seconds[run].sum()) + added + self._shared_seconds(first, end),
        )

    def arrived(self, mode: int) -> Floats:
        """(N,) `arrived_bytes` of a stage that begins with each block."""
        return np.zeros(self.num_blocks) if self.arrived_bytes is None else np.append(0.0, self.arrived_bytes[mode])

    def handed(self, mode: int) -> Floats:
        """(N,) `handed_bytes` of a stage that ends with each block; the other ways of backward have dropped as much."""
        return np.zeros(self.num_blocks) if self.handed_bytes is None else np.append(self.handed_bytes[mode], 0.0)

    @property
    def freed_bytes(self) -> Floats:
        """(R, N) what either way of backward drops of what forward saved, before it comes to the blocks in front."""
        return np.maximum(self.saved_bytes - self.weight_saved_bytes, 0.0)

    @staticmethod
    def _beside(extra: Floats, room: Floats, mode: int, run: slice) -> float:
        behind = room[mode, run][::-1].cumsum()[::-1] - room[mode, run]
        return max(0.0, float((extra[mode, run] - behind).max()))

    def _shared_seconds(self, first: int, end: int) -> float:
        """Of parameters that these blocks read, and blocks of other stages too."""
        inside = [(sum(first <= block < end for block in blocks), blocks, seconds) for blocks, seconds in self.shared]
        return sum(seconds for number, blocks, seconds in inside if 0 < number < len(blocks))


_BY_MODE = (
    "forward_seconds",
    "backward_seconds",
    "weight_seconds",
    "saved_bytes",
    "weight_saved_bytes",
    "forward_extra_bytes",
    "backward_extra_bytes",
)


def run_transients(extra: Floats, room: Floats) -> Floats:
    """(N, N) of runs, [length - 1, first]: the most that comes and goes in a block beyond what all blocks of the run
    save, since those behind it have not saved their `room` yet, or have dropped it already."""
    inside = np.cumsum(room)
    size = len(room)
    ends = np.minimum(np.add.outer(np.arange(size), np.arange(size)), size - 1)
    return np.maximum(run_maxima(extra + inside) - inside[ends], 0.0)


def run_sums(values: Floats) -> Floats:
    """(N, N) sums of runs: [length - 1, first]; infinity where a run leaves the model."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    return _by_length(len(values), lambda length: before[length:] - before[:-length])


def run_maxima(values: Floats) -> Floats:
    """(N, N) largest value of runs: [length - 1, first]; infinity where a run leaves the model."""
    found = np.full((len(values), len(values)), np.inf)
    found[0] = values
    for length in range(2, len(values) + 1):
        rows = len(values) - length + 1
        found[length - 1, :rows] = np.maximum(found[length - 2, :rows], values[length - 1 :])
    return found


def _by_length(size: int, sums: Callable[[int], Floats]) -> Floats:
    found = np.full((size, size), np.inf)
    for length in range(1, size + 1):
        found[length - 1, : size - length + 1] = sums(length)
    return found
