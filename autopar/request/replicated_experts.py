"""Replicated experts as asked: replicated_experts=2 | {"layers.*.experts": [0, 3]}.

Where rows travel to the ranks of their experts (`ep="dispatch"`, `"two_level"`), those of replicated experts stay:
every rank gets a copy of their weights in every step, and their gradients are added up (shadowing, FasterMoE,
https://doi.org/10.1145/3503221.3508418). A number means so many of the experts of every module that have most rows by
`expert_load=`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from autopar.errors import ConfigurationError
from autopar.request.axis_ways import TRAVELLING
from autopar.request.expert_load import modules_called

ReplicatedExperts: TypeAlias = int | Mapping[str, Sequence[int]]


def check_replicated(asked: object, ep: str | None, has_load: bool, has_axis: bool) -> None:
    """Raise ConfigurationError for what cannot be meant."""
    if asked is None:
        return
    if not has_axis or ep not in (None, *TRAVELLING):
        raise ConfigurationError(
            f"replicated_experts={asked!r}: experts are replicated where rows travel to them; write dims={{'ep': 4}}, "
            "ep='dispatch'"
        )
    if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0:
        if asked and not has_load:
            raise ConfigurationError(
                f"replicated_experts={asked}: which experts have most rows is not known; say expert_load=, too, or "
                "name them: {'layers.*.experts': [0, 3]}"
            )
        return
    if not isinstance(asked, Mapping):
        raise ConfigurationError(f"replicated_experts={asked!r}: write a number from 0 on, or experts per module")
    for name, experts in asked.items():
        numbers = list(experts) if isinstance(experts, Sequence) and not isinstance(experts, str) else None
        right = numbers is not None and all(type(one) is int and one >= 0 for one in numbers)
        if numbers is None or not right or len({*numbers}) < len(numbers):
            raise ConfigurationError(f"replicated_experts[{name!r}] is {experts!r}: write experts, counted from 0 on")


def replicated_of_modules(
    asked: ReplicatedExperts | None, load: Mapping[str, Sequence[float]], modules: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Module -> its experts that are replicated, in order, of those that have some.

    load: of `load_shares`; modules: with products of experts, and the number of these. Raises ConfigurationError for
    patterns that no module has, and for experts that there are not.
    """
    if asked is None:
        return {}
    if isinstance(asked, int):
        return {name: busiest_experts(load[name], asked) for name in modules if name in load and asked}
    found: dict[str, tuple[int, ...]] = {}
    for pattern, experts in asked.items():
        for name in modules_called(pattern, modules, "replicated_experts"):
            if unknown := [one for one in experts if one >= modules[name]]:
                raise ConfigurationError(
                    f"replicated_experts[{pattern!r}] has {unknown[0]}, {name} has experts 0 to {modules[name] - 1}"
                )
            if experts:
                found[name] = tuple(sorted(experts))
    return found


def busiest_experts(shares: Sequence[float], number: int) -> tuple[int, ...]:
    """The experts with the largest shares, as many as asked or as there are, in order."""
    return tuple(sorted(sorted(range(len(shares)), key=lambda expert: -shares[expert])[:number]))
