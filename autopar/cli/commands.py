"""The commands. Exit codes: 0 ok, 2 bad usage or input, 3 no plan fits, 4 verification failed, 130 interrupted.

With `--json` stdout holds exactly one JSON document (also for errors); logs and progress go to stderr.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

import click
from rich.console import Console

from autopar.api import plan as make_plan
from autopar.capture.models import load_model
from autopar.cli.bound_plan import bound, given_options
from autopar.cli.cache_command import cache
from autopar.cli.calibrate_command import calibrate
from autopar.cli.diff_command import diff
from autopar.cli.doctor_command import doctor
from autopar.cli.export_command import export
from autopar.cli.import_command import import_
from autopar.cli.options import (
    OPTIMIZERS,
    OUTPUT_FILE,
    PRECISIONS,
    planning_arguments,
    read_cluster,
)
from autopar.cli.output import as_json_option, print_answer, print_document
from autopar.cli.profile_command import profile
from autopar.cli.question_commands import edit, explain, memory, what_if
from autopar.cli.report_command import report
from autopar.cli.rule_commands import rules
from autopar.cli.run_command import run
from autopar.cli.simulate_command import simulate
from autopar.cli.verify_command import verify_model
from autopar.demo.journey import run_demo
from autopar.errors import AutoparError, InfeasibleError, VerificationError
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_folding import folded
from autopar.report.terminal_tables import page
from autopar.request.constraints import Recompute
from autopar.request.search_mode import Mode

EXIT_USAGE, EXIT_INFEASIBLE, EXIT_VERIFICATION, EXIT_INTERRUPTED = 2, 3, 4, 130
INTERRUPTED = "interrupted: there was no plan yet, and nothing is written"
Command = TypeVar("Command", bound=Callable[..., Any])


def model_options(command: Command) -> Command:
    """Options of every command that takes a model; their defaults are shown and stored in the plan."""
    for option in (
        click.option(
            "--constraint", "constraints", multiple=True,
            help="PATTERN=R, PATTERN:AXIS=S(0), PATTERN:recompute=full, or no_replicated_compute.",
        ),
        click.option("--recompute", type=click.Choice(get_args(Recompute)), help="Default: as memory asks."),
        click.option("--schedule", help="Of a pipeline (--dims pp=2): 1f1b, zb-h1, ... Default: the best simulated."),
        click.option(
            "--micro-batches", type=click.IntRange(min=1), help="Parts of the batch that a step runs in turn."
        ),
        click.option("--memory-limit", help="Per device: 72GiB, or 0.9 for a part of its memory."),
        click.option("--mesh", help="Sizes of the axes: 2,8. Default: all factorisations are tried."),
        click.option("--dims", help="Named axes: tp=4,dp_shard=-1; pp=1+3. Default: free."),
        click.option(
            "--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", show_default=True,
            help="Whose state is planned.",
        ),
        click.option(
            "--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True,
            help="bf16: fp32 parameters, bf16 products.",
        ),
        click.option("--seq", type=click.IntRange(min=1), default=128, show_default=True, help="Sequence length."),
        click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Global batch."),
    ):  # fmt: skip
        command = option(command)
    return click.argument("model")(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="autopar")
def commands() -> None:
    """Plan how a PyTorch model is split over a cluster, prove the plan optimal, and run it."""


@commands.command()
@as_json_option
def demo(as_json: bool) -> None:
    """Plan a GPT for 2x8 H100 on this machine, then train one on four local processes.

    Example: autopar demo
    """
    results = run_demo(Console(stderr=as_json))
    if as_json:
        print_document(results)


@commands.command()
@model_options
@click.option("--cluster", default="here", show_default=True, help='"2x8 H100-SXM", a cluster file, or "here".')
@click.option(
    "--mode",
    type=click.Choice(get_args(Mode)),
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
@as_json_option
def plan(
    model: str,
    cluster: str,
    output: Path | None,
    kernels: Path | None,
    as_json: bool,
    warm_start: Path | None,
    **options: Any,
) -> None:
    """Plan MODEL (pkg.module:factory or hf:CONFIG.json) and print the plan beside its baselines.

    Example: autopar plan hf:config.json --cluster "2x8 H100-SXM" --batch 64 --seq 128 -o plan.json
    """
    question = {"model": model, "cluster_text": cluster, **options, "constraints": list(options["constraints"])}
    print_question(question)
    module, inputs = load_model(model, options["batch"], options["seq"])
    found = make_plan(
        module,
        inputs,
        cluster=read_cluster(cluster, kernels),
        precision=options["precision"],
        mode=options["mode"],
        **planning_arguments(options),
        time_limit=options["time_limit"],
        warm_start=warm_start,
    )
    found = found.with_(question={**found.question, **question})
    if output is not None:
        found.save(output)
    print_plan(found, as_json)


@commands.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--code", "rank", type=click.IntRange(min=0), help="The program of this rank instead, line by line.")
@click.option("--whole", is_flag=True, help="With --code on a terminal: repeated layers too. A pipe gets all lines.")
@given_options
@as_json_option
def show(path: Path, rank: int | None, whole: bool, as_json: bool, **given: Any) -> None:
    """Print the plan file PATH, or with --code the program that one rank runs; on a terminal through the pager, with
    repeated layers folded.

    Example: autopar show plan.json
    """
    if rank is None:
        print_plan(Plan.load(path), as_json)
        return
    asked = bound(path, given)
    found = asked.plan.code(rank)
    if as_json or not sys.stdout.isatty():
        print_answer(found, as_json)
    else:
        click.echo_via_pager(found.text if whole else folded(found.text))


@commands.command()
@model_options
@click.option("--processes", type=click.IntRange(min=1), default=4, show_default=True, help="Local gloo processes.")
@click.option(
    "--plan", "plan_path", type=click.Path(dir_okay=False, path_type=Path), help="A plan file; default: make one."
)
@as_json_option
def verify(model: str, processes: int, plan_path: Path | None, as_json: bool, **options: Any) -> None:
    """Compile MODEL on local processes and compare loss and gradients with the plain model.

    Example: autopar verify hf:config.json --processes 2 --batch 8 --seq 32
    """
    print_question({"model": model, "processes": processes, **options})
    verify_model(model, processes, None if plan_path is None else Plan.load(plan_path), options)
    if as_json:
        print_document({"model": model, "processes": processes, "verified": True})
    else:
        click.echo(f"{model}: {processes} processes compute the loss and the gradients of one")


commands.add_command(cache)
commands.add_command(calibrate)
commands.add_command(diff)
commands.add_command(doctor)
commands.add_command(edit)
commands.add_command(explain)
commands.add_command(export)
commands.add_command(import_)
commands.add_command(memory)
commands.add_command(profile)
commands.add_command(report)
commands.add_command(rules)
commands.add_command(run)
commands.add_command(simulate)
commands.add_command(what_if)


def print_question(question: Mapping[str, Any]) -> None:
    """Every option with its value, defaults too, on stderr."""
    click.echo(" ".join(f"{name}={value}" for name, value in question.items() if value not in (None, (), [])), err=True)


def print_plan(found: Plan, as_json: bool) -> None:
    """The plan as JSON, or as tables."""
    if as_json:
        click.echo(found.to_json().decode())
    else:
        Console().print(page(found))


def exit_code(error: AutoparError) -> int:
    """3 where nothing fits, 4 where results differ, else 2."""
    if isinstance(error, InfeasibleError):
        return EXIT_INFEASIBLE
    return EXIT_VERIFICATION if isinstance(error, VerificationError) else EXIT_USAGE


def log_to_stderr() -> None:
    """Phases of autopar as plain lines on stderr."""
    logger = logging.getLogger("autopar")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `autopar` script. Always exits."""
    log_to_stderr()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(commands.main(args=words, prog_name="autopar", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        _leave(words, "UsageError", error.format_message(), EXIT_USAGE)
    except click.Abort:
        click.echo(INTERRUPTED, err=True)
        _leave(words, "Interrupted", INTERRUPTED, EXIT_INTERRUPTED)
    except AutoparError as error:
        name = public_name(error)
        click.echo(f"{name}: {error}", err=True)
        _leave(words, name, str(error), exit_code(error))
    except OSError as error:
        if error.filename is None:
            raise
        message = f"{error.filename}: {error.strerror}"
        click.echo(f"FileError: {message}", err=True)
        _leave(words, "FileError", message, EXIT_USAGE)


def _leave(words: Sequence[str], name: str, message: str, code: int) -> NoReturn:
    """Exit with a code; with `--json` the error is the document."""
    own = words[: words.index("--")] if "--" in words else words
    if "--json" in own:
        print_document({"error": {"type": name, "message": message}})
    sys.exit(code)


def public_name(error: AutoparError) -> str:
    """The class of `autopar.errors` that a user would catch: an InfeasibleError of the planner has one of its own."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == AutoparError.__module__)
