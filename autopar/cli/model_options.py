"""Options of every command that takes a model: what `plan` and `verify` may be asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from autopar.cli.options import OPTIMIZERS, OneOf, on_or_number
from autopar.request.argument_types import Branch
from autopar.request.axis_ways import CONTEXT_WAYS, EXPERT_WAYS
from autopar.request.constraints import Recompute
from autopar.request.lossy import LOSSY
from autopar.request.offload import OFFLOADS
from autopar.request.precision_name import REDUCE_NAMES

Command = TypeVar("Command", bound=Callable[..., Any])


def model_options(command: Command) -> Command:
    """Options of every command that takes a model; their defaults are shown and stored in the plan."""
    for option in (
        click.option(
            "--constraint", "constraints", multiple=True,
            help="PATTERN=R, PATTERN:AXIS=S(0), PATTERN:recompute=full, or no_replicated_compute.",
        ),
        click.option(
            "--discover", is_flag=True, help="Look for rules of operators that have none, by executing them."
        ),
        click.option(
            "--branches", type=OneOf(get_args(Branch)),
            help="example: where values decide, go the way of the example inputs, and check it in every call.",
        ),
        click.option(
            "--deterministic", type=on_or_number, metavar="on|NUMBER", default=False,
            help="on: equal bits for equal plans; 8: on 1, 2, 4 and 8 processes too, on CPUs.",
        ),
        click.option(
            "--reduce-dtype", type=OneOf(REDUCE_NAMES),
            help="In which gradients are added over ranks. Default: fp32, or the dtype of bf16 parameters.",
        ),
        click.option(
            "--ep", type=OneOf(EXPERT_WAYS),
            help="How products of experts run over an axis ep of --dims. Default: what costs least.",
        ),
        click.option(
            "--expert-capacity", type=float,
            help="With --ep capacity: how many times its even share of a rank's rows an expert takes, such as 1.25.",
        ),
        click.option(
            "--expert-load", metavar="zipf:S|LOG",
            help="How rows are dealt out to experts: zipf:1.2, or a log of StepLog (run.jsonl). Default: evenly.",
        ),
        click.option(
            "--replicated-experts", type=click.IntRange(min=0), metavar="N",
            help="Of how many of the busiest experts every rank has a copy. Default: as the load makes worth it.",
        ),
        click.option(
            "--cp", type=OneOf(CONTEXT_WAYS),
            help="How attention runs over an axis cp of --dims. Default: what costs least.",
        ),
        click.option("--recompute", type=OneOf(get_args(Recompute)), help="Default: as memory asks."),
        click.option(
            "--offload", type=OneOf(OFFLOADS),
            help="What may wait on the host where memory is short. Default: nothing.",
        ),
        click.option(
            "--lossy", type=OneOf(LOSSY),
            help="To how few bits saved values may be rounded where memory is short. Default: to none.",
        ),
        click.option("--schedule", help="Of a pipeline (--dims pp=2): 1f1b, zb-h1, ... Default: the best simulated."),
        click.option(
            "--micro-batches", type=click.IntRange(min=1), help="Parts of the batch that a step runs in turn."
        ),
        click.option("--memory-limit", help="Per device: 72GiB, or 0.9 for a part of its memory."),
        click.option("--mesh", help="Sizes of the axes: 2,8. Default: all factorisations are tried."),
        click.option("--dims", help="Named axes: tp=4,dp_shard=-1; pp=1+3. Default: free."),
        click.option(
            "--optimizer", type=OneOf(list(OPTIMIZERS)), default="adamw", show_default=True,
            help="Whose state is planned.",
        ),
        click.option("--seq", type=click.IntRange(min=1), default=128, show_default=True, help="Sequence length."),
        click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Global batch."),
    ):  # fmt: skip
        command = option(command)
    return click.argument("model")(command)
