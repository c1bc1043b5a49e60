"""Time the stage search on a transformer of 126 layers: python -m benchmarks.stages [--real] [--write]

Embedding, 126 equal layers and a head with the FLOPs and bytes of Llama-3.1-405B at 8,192 tokens per micro-batch, cut
into stages on sub-meshes of 1, 2, 4, ... units. Costs are synthetic (400 TFLOP/s of a GPU, 7 % lost per doubling of a
sub-mesh): the times say how the search scales, not how good the cuts are. Every cut is the optimum of its formula over
these sub-meshes and three ways of recomputation per stage. CPU seconds, one run each.

--real: block tables of Llama-3.1-405B itself instead (batch 2048 x 8192 in 512 micro-batches, AdamW, nodes of 8 H100),
captured at a micro-batch and solved on one data x tensor mesh of every size; the second kind of devices has the same
tables at 0.45 of the speed. What the tables took is a row of its own.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.pipelines.block_table import BlockTable
from autopar.planner.pipelines.stage_search import CutQuestion, cut_into_stages
from benchmarks.models import LossOnly, workload
from benchmarks.results import write_results
from benchmarks.sub_meshes import sub_meshes

RESULTS = Path(__file__).parent / "results" / "stages.json"
LAYERS, TOKENS, WIDTH, VOCABULARY = 126, 8192, 16384, 128256
LAYER_PARAMETERS, FLOPS_PER_SECOND = 3.19e9, 400e12
EFFICIENCY = 0.93
"""Of a sub-mesh of twice as many units."""
STATE_BYTES = 18.0
"""Per parameter: bf16 weight, fp32 gradient, master copy and two moments."""
SAVED_BYTES = (34.0, 20.0, 2.0)
"""Per token and unit of width that a layer keeps: nothing recomputed, selectively, in full."""
AGAIN = (0.0, 0.05, 1.0)
"""Part of forward that backward runs again."""
NETWORK_BYTES_PER_SECOND = 50e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """groups: GPUs of each kind, with their speed beside the first kind; unit: GPUs of the smallest sub-mesh."""

    name: str
    groups: tuple[tuple[int, float], ...]
    unit: int
    most_stages: int
    micro_batches: int
    memory_bytes: float = 76e9
    limit_seconds: float = 10.0


CASES = (
    Case(name="1,024 GPUs", groups=((1024, 1.0),), unit=16, most_stages=32, micro_batches=128),
    Case(name="1,024 GPUs, nodes of 8", groups=((1024, 1.0),), unit=8, most_stages=64, micro_batches=128),
    Case(
        name="1,024 GPUs of 10 GB",
        groups=((1024, 1.0),),
        unit=16,
        most_stages=32,
        micro_batches=128,
        memory_bytes=9.5e9,
    ),
    Case(name="16,384 GPUs", groups=((16384, 1.0),), unit=256, most_stages=32, micro_batches=512),
    Case(name="16,384 GPUs, finer", groups=((16384, 1.0),), unit=128, most_stages=64, micro_batches=512),
    Case(
        name="two kinds, 512 + 512",
        groups=((512, 1.0), (512, 0.45)),
        unit=32,
        most_stages=32,
        micro_batches=128,
        limit_seconds=60.0,
    ),
)


def table(gpus: int, units: int, group: int, speed: float, memory_bytes: float) -> BlockTable:
    """The blocks on a sub-mesh of `gpus` GPUs, which are `units` of the search."""
    head = WIDTH * VOCABULARY
    parameters = np.array([head, *[LAYER_PARAMETERS] * LAYERS, head])
    work = np.array([0.0, *[LAYER_PARAMETERS] * LAYERS, head])
    rate = FLOPS_PER_SECOND * speed * gpus * EFFICIENCY ** np.log2(units)
    forward = np.tile(2.0 * TOKENS * work / rate, (3, 1))
    again = np.array(AGAIN)[:, None]
    kept = np.array([2.0, *[1.0] * LAYERS, 2.0])
    saved = np.array(SAVED_BYTES)[:, None] * TOKENS * WIDTH * kept / gpus
    borders = np.full(LAYERS + 1, 2.0 * TOKENS * WIDTH / gpus)
    nothing = np.zeros_like(forward)
    return BlockTable(
        name=f"{gpus} GPUs",
        devices=units,
        group=group,
        capacity_bytes=memory_bytes,
        forward_seconds=forward,
        backward_seconds=forward * (1.0 + again),
        weight_seconds=forward,
        saved_bytes=saved,
        weight_saved_bytes=nothing,
        forward_extra_bytes=nothing,
        backward_extra_bytes=np.tile(saved[0], (3, 1)),
        state_bytes=STATE_BYTES * parameters / gpus,
        once_seconds=np.zeros(LAYERS + 2),
        send_bytes=borders,
        send_seconds=borders / NETWORK_BYTES_PER_SECOND,
    )


def question(case: Case) -> CutQuestion:
    """The stage search of a case under 1F1B."""
    tables = [
        table(case.unit << step, 1 << step, group, speed, case.memory_bytes)
        for group, (gpus, speed) in enumerate(case.groups)
        for step in range((gpus // case.unit).bit_length())
    ]
    return CutQuestion(
        tables=tuple(tables),
        devices=tuple(gpus // case.unit for gpus, _ in case.groups),
        micro_batches=case.micro_batches,
        in_flight=tuple(min(left + 1, case.micro_batches) for left in range(case.most_stages)),
    )


REAL_MICRO_BATCHES = 512
REAL_CASES = tuple(
    replace(case, micro_batches=REAL_MICRO_BATCHES)
    for case in CASES
    if case.name in ("1,024 GPUs", "16,384 GPUs", "two kinds, 512 + 512")
)
REAL_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""GPUs of a sub-mesh; larger ones have no use here, as a micro-batch has four samples."""
WHOLE = "2048x8 H100-SXM"


def real_tables() -> dict[int, BlockTable]:
    """Block tables of Llama-3.1-405B by the GPUs of their sub-mesh, of neighbouring nodes of one cluster."""
    model, inputs = workload("llama3.1-405b")
    shapes = sub_meshes(LossOnly(model), inputs, Cluster.parse(WHOLE))
    found = {}
    for size in REAL_SIZES:
        sub = shapes.on_mesh(REAL_MICRO_BATCHES, Mesh(("outer", "inner"), (size // 8, 8)))
        assert sub is not None, "nothing is asked of the layouts"
        found[size] = sub.table
        print(f"table of {size} GPUs, {time.process_time():.0f} CPU s so far", flush=True)
    return found


def real_question(case: Case, tables: dict[int, BlockTable]) -> CutQuestion:
    """The stage search of a case over the tables that fit into its groups."""
    kinds = [
        replace(
            one,
            devices=size // case.unit,
            group=group,
            forward_seconds=one.forward_seconds / speed,
            backward_seconds=one.backward_seconds / speed,
            weight_seconds=one.weight_seconds / speed,
        )
        for group, (gpus, speed) in enumerate(case.groups)
        for size, one in tables.items()
        if case.unit <= size <= gpus
    ]
    return replace(question(case), tables=tuple(kinds))


def run(case: Case, asked: CutQuestion) -> dict[str, Any]:
    """What the search found, and its CPU seconds."""
    began = time.process_time()
    cut = cut_into_stages(asked)
    seconds = time.process_time() - began
    row: dict[str, Any] = {"case": case.name, "cpu_seconds": round(seconds, 2), "limit_seconds": case.limit_seconds}
    if cut is not None:
        row |= {
            "objective_seconds": round(cut.objective_seconds, 4),
            "stages": [
                f"{s.end - s.first} blocks on {asked.tables[s.table].name}, {asked.tables[s.table].modes[s.mode]}"
                for s in cut.stages
            ],
            "passes": cut.passes,
            "candidates": cut.candidates,
        }
    return row


def show(found: dict[str, Any]) -> None:
    """One row for people."""
    print(
        f"{found['case']:24} {found['cpu_seconds']:6.2f} CPU s of {found['limit_seconds']:g}, "
        f"{len(found.get('stages', []))} stages, {found.get('passes', 0)} passes over {found.get('candidates', 0)} "
        f"candidates, step {found.get('objective_seconds', float('nan')):.3f} s",
        flush=True,
    )


def main() -> None:
    rows = []
    real = "--real" in sys.argv
    tables = real_tables() if real else {}
    spent = time.process_time()
    for case in REAL_CASES if real else CASES:
        rows.append(run(case, real_question(case, tables) if real else question(case)))
        show(rows[-1])
    if "--write" in sys.argv:
        more = {"tables": len(tables), "cpu_seconds_of_tables": round(spent, 1)} if real else {}
        write_results(RESULTS.with_name("stages_real.json") if real else RESULTS, {"rows": rows, **more})


if __name__ == "__main__":
    main()
