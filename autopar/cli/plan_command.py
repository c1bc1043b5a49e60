"""`autopar plan`: the best plan of a model for a cluster.

autopar plan hf:config.json --cluster "2x8 H100-SXM" --batch 64 --seq 2048 -o plan.json

What is asked is read and checked before the model is built, and before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from autopar.cli.bound_plan import load_model
from autopar.cli.model_options import model_options
from autopar.cli.options import OUTPUT_FILE, OneOf, planning_arguments, read_cluster
from autopar.cli.output import as_json_option, print_question
from autopar.cli.printed_plan import print_plan, verbose_option, what_became_of
from autopar.later import later
from autopar.plans.parallel_plan import Plan
from autopar.report.progress_line import progress_line
from autopar.request import Request
from autopar.request.model_name import configured_precision
from autopar.request.precision_name import PRECISION_NAMES
from autopar.request.search_mode import Mode

make_plan: Callable[..., Plan] = later("autopar.api", "plan")


@click.command()
@model_options
@click.option(
    "--precision",
    type=OneOf(PRECISION_NAMES),
    help="bf16: fp32 parameters, bf16 products. Default: as an hf: configuration says, else fp32.",
)
@click.option("--cluster", default="here", show_default=True, help='"2x8 H100-SXM", a cluster file, or "here".')
@click.option(
    "--mode",
    type=OneOf(get_args(Mode)),
    default="default",
    show_default=True,
    help="How long to search for the optimum: seconds, a minute, or many.",
)
@click.option("--time-limit", type=click.FloatRange(min=0.0, min_open=True), help="Seconds for the whole planning.")
@click.option(
    "--warm-start", type=click.Path(dir_okay=False, path_type=Path), help="An older plan, with which the search begins."
)
@click.option("-o", "--output", type=OUTPUT_FILE, help="Where the plan is written.")
@click.option(
    "--profile",
    "kernels",
    type=click.Path(dir_okay=False, path_type=Path),
    help="GPU kernels measured by `autopar profile -o FILE` on one GPU of the cluster.",
)
@verbose_option
@as_json_option
def plan(
    model: str,
    cluster: str,
    output: Path | None,
    kernels: Path | None,
    verbose: bool,
    as_json: bool,
    warm_start: Path | None,
    **options: Any,
) -> None:
    """Plan MODEL (pkg.module:factory or hf:CONFIG.json) and print the plan beside its baselines.

    Example: autopar plan hf:config.json --cluster "2x8 H100-SXM" --batch 64 --seq 128 -o plan.json
    """
    options["precision"] = options["precision"] or configured_precision(model) or "fp32"
    question = {"model": model, "cluster_text": cluster, **options, "constraints": list(options["constraints"])}
    print_question(question)
    asked = {
        "cluster": read_cluster(cluster, kernels),
        "precision": options["precision"],
        "mode": options["mode"],
        **planning_arguments(options),
        "time_limit": options["time_limit"],
        "warm_start": warm_start,
    }
    Request(**asked)  # refuses what cannot be meant
    with progress_line(options["time_limit"], verbose):
        module, inputs = load_model(model, options["batch"], options["seq"], values=options["branches"] is not None)
        found = make_plan(module, inputs, **asked)
    load = found.question.get("expert_load")  # in numbers: the log that was read may change
    found = found.with_(question={**found.question, **question, "expert_load": load})
    if output is not None:
        found.save(output)
    print_plan(found, as_json, verbose, what_became_of(output))
