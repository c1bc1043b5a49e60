"""What a user may write after an option, turned into what `autopar.plan` takes.

    --dims tp=4,dp_shard=-1    --constraint no_replicated_compute
    --mesh 2,4                 --constraint 'layers.*.up.weight:tp=S(0)' --constraint 'lm_head=R'
                               --constraint 'layers.0:recompute=full'

Texts that mean nothing are `click.BadParameter`s that show how to write them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from autopar.files import refuse_other_nodes
from autopar.hardware.cluster import Cluster
from autopar.hardware.operator_profile import load_profile
from autopar.nearest_name import did_you_mean, nearest_name
from autopar.plans.logical_shards import Deterministic
from autopar.request.constraints import EVERY_AXIS, NO_REPLICATED_COMPUTE

OPTIMIZERS: dict[str, str | None] = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "none": None}
"""What `--optimizer` says -> torch's class, by its name."""
_AS_GIVEN = (
    "memory_limit", "micro_batches", "schedule", "recompute", "offload", "lossy", "cp", "ep", "expert_load",
    "replicated_experts", "expert_capacity", "discover", "branches", "deterministic", "reduce_dtype",
)  # fmt: skip
HERE = "here"
"""The cluster that is this machine."""

Constraints = dict[str, dict[str, str] | bool]


class OutputPath(click.Path):
    """A file that will be written: refused before the work where its folder cannot hold it, not behind it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """The path. Fails where it is something else than a file, or its folder is none or cannot be written."""
        found = Path(os.fsdecode(super().convert(value, parameter, context)))
        folder = Path(os.path.realpath(found)).parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            why = "does not exist" if not folder.exists() else "is closed to you" if folder.is_dir() else "is no folder"
            self.fail(f"{found} cannot be written: {folder} {why}")
        refuse_other_nodes(found)
        return found


OUTPUT_FILE = OutputPath()


class OneOf(click.Choice[str]):
    """One of some words; of a mistyped one the error says which may be meant."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """click's own words, and the nearest choice."""
        said = super().get_invalid_choice_message(value, ctx)
        near = nearest_name(str(value), self.choices)
        return said if near is None else f"{said} Did you mean '{near}'?"


def on_or_number(text: str | int) -> Deterministic:
    """ "on" -> True, "8" -> 8: what `deterministic=` takes."""
    if isinstance(text, int):
        return text
    if text != "on" and not text.isdigit():
        raise click.BadParameter(f"{text!r}: write on, or a number of logical shards, such as 8")
    return True if text == "on" else int(text)


def planning_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """What `model_options` of a command say beside model, batch and precision, as arguments of `autopar.plan`."""
    if options["optimizer"] not in OPTIMIZERS:
        asked = options["optimizer"]
        raise click.BadParameter(
            f"optimizer {asked!r}: write one of {', '.join(OPTIMIZERS)}{did_you_mean(asked, OPTIMIZERS)}"
        )
    return {
        "optimizer": OPTIMIZERS[options["optimizer"]],
        "mesh": parse_mesh(options["mesh"]),
        "dims": parse_dims(options["dims"]),
        "constraints": parse_constraints(options["constraints"]),
        **{name: options.get(name) for name in _AS_GIVEN},  # files name the ways of axes and loads only where asked
    }


def parse_dims(text: str | None) -> dict[str, int | list[int]] | None:
    """ "tp=4,dp_shard=2" -> {"tp": 4, "dp_shard": 2}; "pp=1+3" -> {"pp": [1, 3]}, the devices of every stage."""
    if not text:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    names = [name.strip() for name, _, _ in pairs]
    if len(set(names)) < len(names):
        raise click.BadParameter(f"{text!r} names an axis twice: write each once")
    try:
        return {
            name.strip(): [int(n) for n in size.split("+")] if "+" in size else int(size) for name, _, size in pairs
        }
    except ValueError:
        raise click.BadParameter(f"{text!r}: write axis=size, for example tp=4,dp_shard=-1 or pp=1+3") from None


def parse_mesh(text: str | None) -> tuple[int, ...] | None:
    """ "2,4" or "2x4" -> (2, 4)."""
    if not text:
        return None
    try:
        return tuple(int(size) for size in re.split(r"[x,]", text))
    except ValueError:
        raise click.BadParameter(f"{text!r}: write sizes, for example 2,4") from None


def parse_constraints(texts: Sequence[str]) -> Constraints | None:
    """Every `--constraint` in one dictionary, as `autopar.plan(constraints=...)` takes it."""
    constraints: Constraints = {}
    for text in texts:
        if text == NO_REPLICATED_COMPUTE:
            constraints[text] = True
            continue
        where, equals, placement = text.partition("=")
        pattern, colon, axis = where.rpartition(":")
        if not equals or (colon and not pattern):
            raise click.BadParameter(
                f"{text!r}: write {NO_REPLICATED_COMPUTE}, PATTERN=PLACEMENT, PATTERN:AXIS=PLACEMENT or "
                "PATTERN:recompute=full"
            )
        by_axis = constraints.setdefault(pattern if colon else where, {})
        assert isinstance(by_axis, dict)
        by_axis[axis if colon else EVERY_AXIS] = placement
    return constraints or None


def read_cluster(text: str, kernels: Path | None = None) -> Cluster:
    """A cluster file, "here" (this machine), or a description such as "2x8 H100-SXM"; kernels: measured on its GPU."""
    if text.endswith(".json"):
        cluster = Cluster.from_file(text)
    else:
        if nearest_name(text, (HERE,)) and text != HERE:
            raise click.BadParameter(f'cluster {text!r}: did you mean "{HERE}", this machine?')
        cluster = Cluster.detect() if text == HERE else Cluster.parse(text)
    return cluster if kernels is None else cluster.with_operator_profile(load_profile(kernels))
