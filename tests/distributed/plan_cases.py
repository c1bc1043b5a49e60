"""The plans under which a model of the zoo is compared with the plain one: the planner's choice and the known ones."""

from __future__ import annotations

from typing import Any

KNOWN_PLANS: dict[str, dict[str, int]] = {
    "DDP": {"dp_replicate": 4},
    "ZeRO-3": {"dp_shard": 4},
    "Megatron": {"tp": 4},
    "ZeRO-3 x Megatron": {"dp_shard": 2, "tp": 2},
}
OWN_CHOICE, NO_REPLICATION = "own choice", "no replicated compute"


def cases(world_size: int) -> dict[str, dict[str, Any]]:
    """Name of the plan -> arguments of `autopar.compile`."""
    found: dict[str, dict[str, Any]] = {OWN_CHOICE: {}}
    if world_size > 1:
        found[NO_REPLICATION] = {"constraints": "no_replicated_compute"}
    if world_size == 4:
        found.update({name: {"dims": dims} for name, dims in KNOWN_PLANS.items()})
    return found
