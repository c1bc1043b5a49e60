"""Whether a run fits: peak of the allocator with its margin, and the CUDA context, against the device's memory.

    peak x (1 + fragmentation) + context <= capacity      ->  "fits", else "OOM"

The margin is that of the planner (`cost_models/memory.py`): 3 %, none where the allocator grows its segments in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.memory import CONTEXT_BYTES, FRAGMENTATION_FRACTION
from autopar.errors import AutoparError
from benchmarks.validation.answers import FITS, OOM
from benchmarks.validation.fields import Row, Unpredictable
from benchmarks.validation.memory import peak_bytes
from benchmarks.validation.rows import training_run
from benchmarks.validation.runs import TrainingRun
from benchmarks.validation.schemas import Predicted, Schema, Tier


def predict(rows: Sequence[Row], schema: Schema, tier: Tier) -> list[Predicted]:
    """The column `outcome` of every row: "fits" or "OOM"."""
    return [_outcome(row, schema, tier) for row in rows]


def _outcome(row: Row, schema: Schema, tier: Tier) -> Predicted:
    try:
        run = training_run(schema, row)
        return Predicted(values={"outcome": FITS if fits(run, peak_bytes(run, tier)) else OOM})
    except (AutoparError, Unpredictable) as error:
        return Predicted(reason=str(error))


def fits(run: TrainingRun, peak: float) -> bool:
    """Whether a run with this allocator peak (bytes) fits its device."""
    device = run.cluster.device
    margin = 0.0 if run.stack.expandable_segments else FRAGMENTATION_FRACTION[device.kind]
    return peak * (1.0 + margin) + CONTEXT_BYTES[device.kind] <= device.memory_bytes
