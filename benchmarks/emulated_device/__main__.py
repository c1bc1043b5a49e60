"""The memory ladder on the emulated device: predicted beside measured, and beside rungs that are pinned by hand.

    AUTOPAR_CACHE=FOLDER autopar profile                               once, on an idle machine
    python -m benchmarks.emulated_device --plans FOLDER --prepare      plans of all settings
    python -m benchmarks.emulated_device --plans FOLDER --write        trains them, one after the other

One thread computes, copies run on another at the rate of the link. A row has seconds (median of `ROUNDS` steps, SGD and
all) and bytes, predicted and measured, of the plan, and the seconds of every rung that fits; rungs with one plan are
measured once. `over_free`: how much longer the step is than that of a device with room for everything, predicted and
measured in the same minutes, as a machine's speed drifts from hour to hour. The last row is a model of so many times
the layers that fit without the ladder, in the same bytes. Least flattering first.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.errors import InfeasibleError
from autopar.plans.parallel_plan import Plan
from benchmarks.emulated_device.settings import MODELS, SETTINGS, Setting, cluster, rungs
from benchmarks.emulated_device.training import Trained, in_turn
from benchmarks.results import commit, write_results

RESULTS = Path(__file__).parents[1] / "results" / "emulated_device.json"
ROUNDS = 15
LARGER, LARGER_MODEL, LARGER_RATE = 3, "chain", 2e9
FREE = "free"


def planned(setting: Setting, limit: float | None, folder: Path, rung: str, layers: int, **options: Any) -> Plan | None:
    """Kept in a file; None where nothing fits."""
    words = f"{setting.name} {layers} {rung}".replace("/", " per ").replace(" ", "-").replace(",", "").replace("%", "")
    path = folder / f"{words}.json"
    if not path.exists():
        model, inputs = MODELS[setting.model].made(layers)
        try:
            plan = autopar.plan(model, inputs, cluster=cluster(setting.rate), optimizer=torch.optim.SGD,
                                micro_batches=1, memory_limit=limit, **options)  # fmt: skip
        except InfeasibleError as error:
            path.write_text(json.dumps(str(error)))
        else:
            plan.save(path)
    content = path.read_bytes()
    return None if content.startswith(b'"') else Plan.from_json(content)


def plans_of(setting: Setting, folder: Path) -> tuple[float, dict[str, Plan]]:
    """(the limit, plans by rung) of a setting; FREE has room for everything."""
    layers = MODELS[setting.model].layers
    free = planned(setting, None, folder, FREE, layers, recompute="none")
    assert free is not None
    limit = setting.share * free.predicted.peak_bytes
    found = {
        rung: planned(setting, limit, folder, rung, layers, **options)
        for rung, options in rungs(setting, layers).items()
    }
    return limit, {FREE: free} | {rung: plan for rung, plan in found.items() if plan is not None}


def row_of(setting: Setting, folder: Path) -> dict[str, Any]:
    """Trains the plans of a setting."""
    limit, plans = plans_of(setting, folder)
    model = MODELS[setting.model]
    trained: dict[str, Trained] = {}
    for rung, plan in plans.items():
        equal = (each for each in trained.values() if not plan.diff(each.plan))
        trained[rung] = next(equal, None) or Trained.of(plan, model, setting.rate)
    in_turn({str(id(each)): each for each in trained.values()}, ROUNDS)
    row: dict[str, Any] = {"setting": setting.name, "limit_bytes": limit, "fits": "plan" in trained}
    row["rungs_s"] = {rung: each.median_seconds for rung, each in trained.items()}
    if "plan" in trained:
        row |= _beside(trained["plan"])
        free = trained.pop(FREE)
        row["over_free"] = {
            "predicted": row["predicted_s"] / free.plan.predicted.step_seconds,
            "measured": row["measured_s"] / free.median_seconds,
        }
        row["of_fastest"] = row["measured_s"] / min(each.median_seconds for each in trained.values())
    trained.clear()
    gc.collect()
    return row


def _beside(trained: Trained) -> dict[str, Any]:
    plan, (peak, host) = trained.plan, trained.peak_bytes()
    return {
        "recomputed": len(plan.recomputed),
        "saved_on_host": len(plan.saved_on_host),
        "stored_on_host": sum(each.stored_on == "host" for each in plan.parameters.values()),
        "predicted_s": plan.predicted.step_seconds, "measured_s": trained.median_seconds,
        "fastest_s": trained.fastest_seconds,
        "predicted_bytes": plan.predicted.peak_bytes, "measured_bytes": peak, "host_bytes": host,
        "overlap": min(trained.overlap, default=None), "steps": len(trained.seconds),
    }  # fmt: skip


def larger(folder: Path) -> dict[str, Any]:
    """A model of `LARGER` times the layers in the bytes that the smaller one takes by itself."""
    layers = MODELS[LARGER_MODEL].layers
    setting = Setting(model=LARGER_MODEL, share=1.0, rate=LARGER_RATE, offload="all")
    alone = planned(setting, None, folder, FREE, layers, recompute="none")
    assert alone is not None
    limit = alone.predicted.peak_bytes
    without = planned(setting, limit, folder, "saved", LARGER * layers, recompute="none")
    plan = planned(setting, limit, folder, "plan", LARGER * layers, offload="all")
    row = {"setting": f"{LARGER_MODEL}, {LARGER} times the layers", "limit_bytes": limit, "fits": plan is not None,
           "fits_without": without is not None}  # fmt: skip
    if plan is not None:
        trained = Trained.of(plan, MODELS[LARGER_MODEL], setting.rate, LARGER * layers)
        in_turn({"plan": trained}, ROUNDS)
        trained.peak_bytes(round(1.02 * limit))
        row |= _beside(trained)
    return row


def in_words(row: dict[str, Any]) -> str:
    """One line."""
    if "measured_s" not in row:
        return f"{row['setting']}: does not fit"
    seconds, peak = row["predicted_s"] / row["measured_s"] - 1, row["predicted_bytes"] / row["measured_bytes"] - 1
    rest = ""
    if "of_fastest" in row:
        over = "{measured:.3f} of free ({predicted:.3f})".format_map(row["over_free"])
        rest = f", {row['of_fastest']:.3f} of the fastest rung, {over}"
    overlap = "nothing copied" if row["overlap"] is None else f"overlap {row['overlap']:.0%}"
    return (
        f"{row['setting']}: {row['measured_s'] * 1e3:.0f} ms ({seconds:+.1%}), "
        f"peak {row['measured_bytes'] / 1e6:.1f} MB ({peak:+.2%}){rest}, {overlap}, "
        f"{row['recomputed']} recomputed, {row['saved_on_host']} saved on host, {row['stored_on_host']} stored there"
    )


def flattering(row: dict[str, Any]) -> float:
    """How far the row is from its goals: 5 % over the fastest rung, 10 % of the seconds, 2 % of the bytes."""
    if "measured_s" not in row:
        return float("-inf")
    seconds, nbytes = row["predicted_s"] / row["measured_s"], row["predicted_bytes"] / row["measured_bytes"]
    return -float(max((row.get("of_fastest", 1.0) - 1) / 0.05, abs(seconds - 1) / 0.1, abs(nbytes - 1) / 0.02))


def _rows(settings: Sequence[Setting], folder: Path) -> Iterator[dict[str, Any]]:
    for setting in settings:
        yield row_of(setting, folder)
    yield larger(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=Path, required=True, help="where plans are kept")
    parser.add_argument("--prepare", action="store_true", help="only plan")
    parser.add_argument("--model", choices=list(MODELS), help="only the settings of one model")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.plans.mkdir(parents=True, exist_ok=True)
    settings = [each for each in SETTINGS if arguments.model in (None, each.model)]
    if arguments.prepare:
        for setting in settings:
            plans = plans_of(setting, arguments.plans)[1]
            print(setting.name, {rung: plan.predicted.step_seconds for rung, plan in plans.items()}, flush=True)
        return
    rows = []
    for row in _rows(settings, arguments.plans):
        print(in_words(row), row.get("rungs_s", ""), flush=True)
        rows.append(row)
    rows.sort(key=flattering)
    print("\nleast flattering first:", *map(in_words, rows), sep="\n")
    if arguments.write:
        command = "python -m benchmarks.emulated_device --plans FOLDER --write"
        write_results(RESULTS, {"command": command, "commit": commit(), "rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
