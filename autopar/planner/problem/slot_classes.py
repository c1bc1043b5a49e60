"""Classes: slots and links that have one label set and one table on every mesh, numbered by hash-consing.

A slot's class is its equivalence class and what the constraints say about it by name; the class of a shared copy is
that of its source and of its readers; a link's class is that of its two ends, the tensor and the views between.

    layers.0.mlp.up, layers.1.mlp.up, ...   one class        layers.7.mlp.up pinned by the user: a class of its own
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from autopar.planner.problem.skeleton import Skeleton, SlotLink


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """of_slot, of_link: class of every slot and link. slots, links: the first of each class; copies come last."""

    of_slot: list[int]
    slots: list[int]
    of_link: list[int]
    links: list[SlotLink]


def classify(skeleton: Skeleton, marks: Mapping[int, Hashable]) -> Classes:
    """The classes of a skeleton. marks: slot -> whatever else tells it from its equivalence class."""
    numbers: dict[Hashable, int] = {}
    of_slot = [-1] * len(skeleton.slots)
    firsts: list[int] = []

    def number(index: int, key: Hashable) -> None:
        of_slot[index] = numbers.setdefault(key, len(firsts))
        if of_slot[index] == len(firsts):
            firsts.append(index)

    for index, slot in enumerate(skeleton.slots):
        if slot.kind != "copy":
            number(index, (slot.equivalence, marks.get(index), tuple(slot.tolls)))
    for index, (into, readers) in skeleton.copies_of.items():
        read = tuple([(of_slot[link.target], link.port, link.views) for link in readers])
        tolls = tuple(skeleton.slots[index].tolls)
        number(index, ("copy", marks.get(index), of_slot[into.source], into.output, tuple(dict.fromkeys(read)), tolls))
    of_link, links = _link_classes(skeleton, of_slot)
    return Classes(of_slot, firsts, of_link, links)


def _link_classes(skeleton: Skeleton, of_slot: list[int]) -> tuple[list[int], list[SlotLink]]:
    numbers: dict[Hashable, int] = {}
    of_link: list[int] = []
    links: list[SlotLink] = []
    for link in skeleton.links:
        key = (of_slot[link.source], link.output, of_slot[link.target], link.port, link.tensor, link.views)
        number = numbers.setdefault(key, len(links))
        if number == len(links):
            links.append(link)
        of_link.append(number)
    return of_link, links
