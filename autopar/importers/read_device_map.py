"""A device map of Accelerate as stages of a plan, as far as a plan can be told.

    stages = stages_of_map({"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "lm_head": 1})
    plan = autopar.plan(model, inputs, cluster="2 A100-80", dims={"pp": 2})
    plan = plan.edit(stage_edits(stages, plan))              # cut where the map cuts; needs the model still

A stage is a run of the forward pass on devices of its own. So a device to which the map comes back, and a place that
is no device (`cpu`, `disk`), are refused by name.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from autopar.errors import ConfigurationError
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import PIPELINE_AXIS

PLACES = ("cpu", "disk", "meta")
"""What a map says beside devices."""
DEVICE_WORDS = ("cuda:", "xpu:", "npu:", "mps:")


def stages_of_map(device_map: Any, origin: str = "the device map") -> dict[str, int]:
    """Module -> stage, in the order of the map, which is that of the model; stages count devices as they appear.

    device_map: name -> number of a device, "cuda:1" or torch.device. Raises ConfigurationError naming the entry that a
    plan cannot say.
    """
    if not isinstance(device_map, Mapping) or not device_map:
        raise ConfigurationError(
            f"{origin} is {reprlib.repr(device_map)}; a map has names and devices, as model.hf_device_map of a model "
            'that was loaded with device_map="auto"'
        )
    stages: dict[str, int] = {}
    order: list[str] = []
    for name, place in device_map.items():
        device = _device(str(name), place, origin)
        if device not in order:
            order.append(device)
        elif device != order[-1]:
            raise ConfigurationError(
                f"{origin}: {name!r} is on device {device} again, behind modules on device {order[-1]}; a stage of a "
                f"plan is one run of the forward pass: put it on device {order[-1]}, or order the map as the model runs"
            )
        stages[str(name)] = order.index(device)
    return stages


def _device(name: str, place: Any, origin: str) -> str:
    """The number of a device. Raises ConfigurationError for what is none."""
    word = str(place)
    if word in PLACES:
        raise ConfigurationError(
            f"{origin}: {name!r} is on {word!r}; a plan keeps weights on its devices: give it a device, plan for "
            "more devices, or take memory_limit= and let the search shard and recompute"
        )
    for prefix in DEVICE_WORDS:
        word = word.removeprefix(prefix)
    if isinstance(place, bool) or not word.isdecimal():
        raise ConfigurationError(f"{origin}: {name!r} is on {reprlib.repr(place)}; write the number of a device")
    return str(int(word))


def stage_edits(stages: Mapping[str, int], plan: Plan) -> dict[str, dict[str, int]]:
    """What `plan.edit` takes to cut a plan of as many stages where the map does.

    Modules of the map in which no operator runs (dropout in eval mode, tables that are inputs) decide nothing. Raises
    ConfigurationError where the plan has another number of stages, or the map names nothing of the model.
    """
    count = 1 + max(stages.values())
    if len(plan.stages) != count:
        raise ConfigurationError(
            f"the device map has {count} devices, the plan {len(plan.stages)} stages: plan with "
            f"dims={{{PIPELINE_AXIS!r}: {count}}}"
        )
    paths = {operator.rpartition("/")[0] for operator in plan.operators if not operator.endswith("/bwd")}
    known = {name for name in stages if any(f"{path}.".startswith(f"{name}.") for path in paths)}
    if count > 1 and {stages[name] for name in known} != set(range(count)):
        raise ConfigurationError(
            f"the device map names no module of the model on some device: it has {', '.join(list(stages)[:3])}, the "
            f"model {', '.join(sorted(paths)[:3])}"
        )
    return {name: {PIPELINE_AXIS: stages[name]} for name in stages if name in known} if count > 1 else {}
