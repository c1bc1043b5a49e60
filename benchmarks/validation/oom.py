"""Whether a run fits: what torch reserves at the peak, and the CUDA context, against what the driver reports.

    reserved + context <= capacity      ->  "fits", else "OOM"

Reserved is the peak with the fragmentation of `memory.py`; where the allocator grows its segments in place it is the
peak itself. A vendor's "80 GB" are GiB less what the driver keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.usable_memory import CONTEXT_BYTES
from autopar.errors import AutoparError
from autopar.hardware.devices import Device
from benchmarks.validation.answers import FITS, OOM
from benchmarks.validation.fields import Row, Unpredictable
from benchmarks.validation.memory import ranks
from benchmarks.validation.rows import training_run
from benchmarks.validation.runs import TrainingRun
from benchmarks.validation.schemas import Predicted, Schema, Tier

REPORTED_BYTES_PER_NOMINAL = 84943110144 / 80e9
"""total_memory of an H800 of 80 GB (deepseek-ai/profile-data deviceProperties) over its nominal bytes."""


def predict(rows: Sequence[Row], schema: Schema, tier: Tier) -> list[Predicted]:
    """The column `outcome` of every row: "fits" or "OOM"."""
    return [_outcome(row, schema, tier) for row in rows]


def _outcome(row: Row, schema: Schema, tier: Tier) -> Predicted:
    try:
        run = training_run(schema, row)
        needed = max(rank.peak if run.stack.expandable_segments else rank.reserved for rank in ranks(run, tier))
        return Predicted(values={"outcome": FITS if fits(run, needed) else OOM})
    except (AutoparError, Unpredictable) as error:
        return Predicted(reason=str(error))


def fits(run: TrainingRun, reserved: float) -> bool:
    """Whether a run whose allocator reserves this many bytes fits its device."""
    device = run.cluster.device
    return reserved + CONTEXT_BYTES[device.kind] <= capacity_bytes(device)


def capacity_bytes(device: Device) -> float:
    """Memory that the driver reports of a device whose preset holds the vendor's figure."""
    return device.memory_bytes * REPORTED_BYTES_PER_NOMINAL if device.kind == "cuda" else device.memory_bytes
