"""`autopar explain`, `memory`, `what-if`, `edit`: questions about a plan file.

autopar explain plan.json lm_head                         # layout, cost by term, runner-up, what binds
autopar explain plan.json --vs fsdp                       # where two plans part, and what each difference costs
autopar memory plan.json                                  # the peak by kind, module and time
autopar what-if plan.json --memory-limit 40GB -o small.json
autopar edit plan.json --set lm_head.weight=S(0) -o edited.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from autopar.cli.bound_plan import bound, given_options, needs_trust, says_its_model
from autopar.cli.options import OUTPUT_FILE, on_or_number, parse_constraints, parse_dims, parse_mesh, read_cluster
from autopar.cli.output import as_json_option, print_answer, print_document
from autopar.errors import ConfigurationError
from autopar.explain.answers import Comparison, Explanations
from autopar.plans.logical_shards import Deterministic
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_summary import plan_columns, plan_row
from autopar.plans.plan_text import matching_names
from autopar.report.differences import changed_lines
from autopar.report.progress_line import progress_line
from autopar.report.terminal_tables import table

PLAN_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("path", type=PLAN_FILE)
@click.argument("name", required=False)
@click.option("--vs", help='Compare with "ddp", "fsdp", "tp", another known plan, or a plan file.')
@click.option("--exact", is_flag=True, help="Search for every runner-up until it is proven.")
@click.option("--quick", is_flag=True, help="Say only what the file holds: no model is captured.")
@given_options
@as_json_option
def explain(
    path: Path, name: str | None, vs: str | None, exact: bool, quick: bool, as_json: bool, **given: Any
) -> None:
    """Say why NAME (parameter, operator, module or glob) lies as it does in the plan file PATH, or compare two plans.

    Example: autopar explain plan.json lm_head
    """
    if (name is None) == (vs is None):
        raise ConfigurationError("give the NAME of a parameter, operator or module, or --vs another plan")
    plan = Plan.load(path)
    other = Plan.load(vs) if vs is not None and vs.endswith(".json") else vs
    if name is not None:
        matching_names(plan, name)  # an unknown name is said before the model is captured
    if name is not None and not quick and needs_trust(plan, given):
        click.echo("from the file alone: it names its model as code; --trust, or --model, asks the model", err=True)
        quick = True
    with progress_line():
        asked = None if vs is None and (quick or not says_its_model(plan, given)) else bound(path, given)
        plan = plan if asked is None else asked.plan
        answer = plan.explain(name, exact=exact) if vs is None else plan.explain(vs=other)
    if not as_json:
        click.echo(str(answer))
    elif isinstance(answer, Comparison):
        print_document(answer.document())
    else:
        print_document({"name": name, **_document(answer)})


def _document(answer: Explanations) -> dict[str, object]:
    return {**answer.document(), "alternatives": {choice.name: choice.others for choice in answer.choices}}


@click.command()
@click.argument("path", type=PLAN_FILE)
@click.option("--rank", type=click.IntRange(min=0), help="Whose memory. Default: 0; with stages, the tightest.")
@given_options
@as_json_option
def memory(path: Path, rank: int | None, as_json: bool, **given: Any) -> None:
    """Say where the memory of the fullest moment of a step goes, by kind, by module and over time.

    Example: autopar memory plan.json
    """
    with progress_line():
        found = bound(path, given).plan.memory(rank)
    print_answer(found, as_json)


@click.command("what-if")
@click.argument("path", type=PLAN_FILE)
@click.option("--memory-limit", help="Per device: 40GB, or 0.9 for a part of its memory.")
@click.option("--dims", help="Named axes: tp=4,dp_shard=-1.")
@click.option("--mesh", help="Sizes of the axes: 2,8.")
@click.option("--constraint", "constraints", multiple=True, help="PATTERN=R, PATTERN:AXIS=S(0), ...")
@click.option("--micro-batches", type=click.IntRange(min=1), help="Parts of the batch.")
@click.option("--discover", is_flag=True, help="Look for rules of operators that have none, by executing them.")
@click.option(
    "--deterministic", type=on_or_number, metavar="on|NUMBER", help="Equal bits of equal plans; 8: on 1 to 8 processes."
)
@click.option("--on", "other_cluster", help='Another cluster: "4x8 H100-SXM".')
@click.option("-o", "--output", type=OUTPUT_FILE, help="Where the plan is written.")
@given_options
@as_json_option
def what_if(
    path: Path,
    memory_limit: str | None,
    dims: str | None,
    mesh: str | None,
    constraints: tuple[str, ...],
    micro_batches: int | None,
    discover: bool,
    deterministic: Deterministic | None,
    other_cluster: str | None,
    output: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Plan the model of the plan file PATH again under other wishes, and print both plans.

    Example: autopar what-if plan.json --dims dp_shard=-1 -o fsdp.json
    """
    words = {
        "memory_limit": memory_limit,
        "dims": dims,
        "mesh": mesh,
        "micro_batches": micro_batches,
        "discover": discover or None,
        "deterministic": deterministic,
    }
    changes: dict[str, Any] = {name: word for name, word in words.items() if word is not None}
    changes |= {"dims": parse_dims(dims)} if dims else {}
    changes |= {"mesh": parse_mesh(mesh)} if mesh else {}
    changes |= {"constraints": parse_constraints(constraints)} if constraints else {}
    changes |= {"cluster": read_cluster(other_cluster)} if other_cluster else {}
    if not changes:
        raise ConfigurationError(
            "what if what? Give --memory-limit, --dims, --mesh, --constraint, --micro-batches, --discover, "
            "--deterministic or --on"
        )
    with progress_line():
        asked = bound(path, given)
        found = asked.plan.what_if(**changes)
    said = {**words, "constraints": list(constraints) or None, "cluster_text": other_cluster}
    question = {**asked.plan.question, **{name: word for name, word in said.items() if word is not None}}
    _hand_out(asked.plan, found.with_(question={**found.question, **question}), output, as_json)


@click.command()
@click.argument("path", type=PLAN_FILE)
@click.option(
    "--set", "placements", multiple=True, help="PATTERN=R, PATTERN:AXIS=S(0). None: check a file edited by hand."
)
@click.option("--schedule", help="With stages: another family of schedules.")
@click.option("--micro-batches", type=click.IntRange(min=1), help="With stages: parts of the batch.")
@click.option("-o", "--output", type=OUTPUT_FILE, help="Where the plan is written.")
@given_options
@as_json_option
def edit(
    path: Path,
    placements: tuple[str, ...],
    schedule: str | None,
    micro_batches: int | None,
    output: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Change placements of the plan file PATH (or check one that was edited by hand), complete and price it again.
    With stages, --set PATTERN:pp=1 moves a block to stage 1.

    Example: autopar edit plan.json --set lm_head.weight=R -o edited.json
    """
    changes: dict[str, Any] = dict(parse_constraints(placements) or {})
    changes |= {"schedule": schedule} if schedule is not None else {}
    changes |= {"micro_batches": micro_batches} if micro_batches is not None else {}
    with progress_line():
        asked = bound(path, given)
        found = asked.plan.edit(changes)
    _hand_out(asked.plan, found, output, as_json)


def _hand_out(before: Plan, after: Plan, output: Path | None, as_json: bool) -> None:
    """The new plan as JSON, or both beside each other."""
    if output is not None:
        after.save(output)
    if as_json:
        click.echo(after.to_json().decode())
        return
    rows = [plan_row("before", before), plan_row("after", after)]
    Console().print(table("plans", plan_columns(before), rows))
    click.echo("\n".join(changed_lines(before, after, ("before", "after"))) or "the same choices")
    for note in after.notes:
        click.echo(note)
