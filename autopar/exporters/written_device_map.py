"""A plan as a device map of Accelerate: every module with the number of the device that holds it.

    device_map(plan)     ({"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "lm_head": 1}, [])

A map knows whole modules on single devices, so stages are what it can say: a rank group counts as one device. It is
what `from_pretrained(device_map=...)` and `accelerate.dispatch_model` take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.plans.parallel_plan import Plan
from autopar.schedules.list_scheduler import FAMILIES

BACKWARD = "/bwd"


def device_map(plan: Plan) -> tuple[dict[str, int], list[str]]:
    """(module or parameter -> device, what the plan does and the map cannot say)."""
    groups = _groups_of_modules(plan)
    held = {name: _group_of(name.rpartition(".")[0], groups) for name in plan.parameters}
    lost = []
    if strangers := [name for name, group in held.items() if group is None]:
        lost.append(f"no operator reads {strangers[0]} and {len(strangers) - 1} more: put on device 0")
    found = dict(_folded("", {name: group or 0 for name, group in held.items()}))
    sizes = sorted({group.size for group in plan.rank_groups})
    if sizes != [1]:
        said = " or ".join(map(str, sizes))
        lost.append(f"the {said} devices of a rank group share its modules in the plan: here they are one device")
    policy = FAMILIES.get(plan.staged.schedule)
    if plan.in_stages and policy is not None and policy.both_ways:
        lost.append(f"{plan.staged.schedule} keeps every stage on two rank groups: here it is on the first")
    if plan.micro_batches > 1:
        lost.append(f"{plan.micro_batches} micro-batches: a map runs one device after the other, on the whole batch")
    return found, lost


def _groups_of_modules(plan: Plan) -> dict[str, int]:
    """Module path -> the rank group of its first forward operator, in the order of the program."""
    stages = iter(plan.stages)
    stage = next(stages)
    found: dict[str, int] = {}
    for operator in plan.operators:
        if operator.endswith(BACKWARD):
            continue
        found.setdefault(operator.rpartition("/")[0], stage.rank_group)
        if operator == stage.last_operator:
            stage = next(stages)
    return found


def _group_of(path: str, groups: Mapping[str, int]) -> int | None:
    """Of a module: by its own operators, those of what it holds, or those of the module around it."""
    while True:
        inside = (group for name, group in groups.items() if name == path or name.startswith(f"{path}.") or not path)
        if (group := next(inside, None)) is not None or not path:
            return group
        path = path.rpartition(".")[0]


def _folded(prefix: str, held: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """The highest modules whose parameters are all on one device. held: by the name behind `prefix`."""
    if len(set(held.values())) <= 1 or "" in held:
        yield prefix.rstrip("."), next(iter(held.values()), 0)
        return
    children: dict[str, dict[str, int]] = {}
    for name, group in held.items():
        first, _, rest = name.partition(".")
        children.setdefault(first, {})[rest] = group
    for first, inside in children.items():
        yield from _folded(f"{prefix}{first}.", inside)
