"""`autopar export`: a plan as the nearest configuration of another tool, with what that gives up and costs.

autopar export plan.json --to megatron              # flags on stdout, what is lost on stderr
autopar export plan.json --to torchtitan -o t.toml --price
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

from autopar.cli.bound_plan import asked, cluster_of, model_of, trust_option
from autopar.cli.options import OUTPUT_FILE, OneOf
from autopar.cli.output import as_json_option, print_document
from autopar.errors import ConfigurationError
from autopar.exporters.uniform import UniformPlan, nearest_uniform
from autopar.exporters.written_configurations import TOOLS, configuration
from autopar.files import write_atomically
from autopar.later import later
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes, format_seconds

make_plan: Callable[..., Plan] = later("autopar.api", "plan")


@click.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--to", "tool", type=OneOf(list(TOOLS)), required=True, help="The tool.")
@click.option("-o", "--output", type=OUTPUT_FILE, help="Where it is written.")
@click.option("--price", is_flag=True, help="Also plan the model with these degrees, to say what they cost.")
@trust_option
@as_json_option
def export(path: Path, tool: str, output: Path | None, price: bool, trust: bool, as_json: bool) -> None:
    """Write the plan file PATH as the nearest configuration of another tool.

    Example: autopar export plan.json --to megatron --price
    """
    plan = Plan.load(path)
    uniform = nearest_uniform(plan)
    made = configuration(plan, uniform, tool)
    lost = (*uniform.lost, *made.lost)
    priced = _priced(plan, uniform, trust) if price else None
    if output is not None:
        write_atomically(output, made.text.encode())
    if as_json:
        print_document(
            {
                "tool": tool,
                "text": made.text,
                "degrees": {name: value for name, value in asdict(uniform).items() if name not in ("lost", "stages")},
                "lost": list(lost),
                "plan_seconds": plan.predicted.step_seconds,
                "uniform_seconds": None if priced is None else priced.predicted.step_seconds,
            }
        )
        return
    if output is None:
        click.echo(made.text, nl=False)
    for sentence in lost:
        click.echo(f"lost: {sentence}", err=True)
    if priced is not None:
        click.echo(_cost(plan, priced), err=True)


def _cost(plan: Plan, priced: Plan) -> str:
    """What the uniform configuration costs beside the plan, both by autopar's own prices and runtime."""
    uniform, chosen = priced.predicted, plan.predicted
    return (
        f"predicted {format_seconds(uniform.step_seconds)} and {format_bytes(uniform.peak_bytes)} per device with "
        f"these degrees, {format_seconds(chosen.step_seconds)} and {format_bytes(chosen.peak_bytes)} as planned: "
        f"{uniform.step_seconds / chosen.step_seconds:.2f} times the step"
    )


def _priced(plan: Plan, uniform: UniformPlan, trust: bool) -> Plan:
    """The model of the plan's question, planned with these degrees. Raises ConfigurationError where it is not known."""
    question = plan.question
    if not question.get("model") or not question.get("cluster_text"):
        raise ConfigurationError(
            "--price needs the model: the plan was made in Python; `autopar plan MODEL -o plan.json` writes plans that "
            "name it"
        )
    arguments = asked(question)
    module, inputs = model_of(plan, {"trust": trust})
    return make_plan(
        module,
        inputs,
        cluster=cluster_of(plan, question, {}),
        dims=uniform.dims or None,
        cp=uniform.asked_way,
        ep=uniform.asked_expert_way,
        expert_capacity=uniform.expert_capacity,
        optimizer=arguments["optimizer"],
        precision=plan.precision,
        reduce_dtype=plan.reduce_dtype,
        memory_limit=arguments["memory_limit"],
        discover=arguments["discover"],
        branches=arguments["branches"],
        deterministic=arguments["deterministic"],
        micro_batches=uniform.micro_batches if uniform.micro_batches > 1 else None,
        schedule=uniform.schedule,
    )
