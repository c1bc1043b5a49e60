"""`autopar import`: another tool's configuration as a plan, priced and readable like any other.

autopar import flags.sh --from megatron --model hf:config.json --cluster "8x8 H100-SXM" -o megatron.json
autopar diff plan.json megatron.json                                      # what it gives up, and what that costs
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from autopar.cli.bound_plan import load_model
from autopar.cli.options import OPTIMIZERS, OUTPUT_FILE, OneOf, read_cluster
from autopar.cli.output import as_json_option
from autopar.cli.printed_plan import print_plan, what_became_of
from autopar.errors import ConfigurationError
from autopar.files import decoded_text, file_content
from autopar.importers.read_configurations import CODE, READERS, plan_options, read_configuration
from autopar.importers.read_device_map import stage_edits
from autopar.later import later
from autopar.plans.parallel_plan import Plan
from autopar.report.progress_line import progress_line

make_plan: Callable[..., Plan] = later("autopar.api", "plan")
ONLY_ASKED = ("cp", "ep", "expert_capacity")
"""Options that a plan names only where they were asked for."""
NO_BATCH = "the configuration does not say the {}: give --{}"


@click.command("import")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--from", "tool", type=OneOf([*READERS, *CODE]), required=True, help="The tool.")
@click.option("--model", required=True, help="pkg.module:factory or hf:CONFIG.json.")
@click.option("--cluster", default="here", show_default=True, help='"2x8 H100-SXM", a cluster file, or "here".')
@click.option("--batch", type=click.IntRange(min=1), help="Global batch. Default: as the configuration says.")
@click.option("--seq", type=click.IntRange(min=1), help="Sequence length. Default: as the configuration says.")
@click.option("--optimizer", type=OneOf(list(OPTIMIZERS)), default="adamw", show_default=True)
@click.option("-o", "--output", type=OUTPUT_FILE, help="Where the plan is written.")
@as_json_option
def import_(
    path: Path,
    tool: str,
    model: str,
    cluster: str,
    batch: int | None,
    seq: int | None,
    optimizer: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Plan a model with the degrees that the configuration file PATH of another tool says.

    Example: autopar import flags.sh --from megatron --model hf:config.json --cluster "2x8 H100-SXM" -o like.json
    """
    where = read_cluster(cluster)
    origin = f"the configuration {path}"
    text = decoded_text(file_content(path, origin), origin)
    uniform = read_configuration(text, tool, num_devices=where.num_devices, origin=str(path))
    for sentence in uniform.lost:
        click.echo(f"lost: {sentence}", err=True)
    sizes = {"batch": batch or uniform.batch, "seq": seq or uniform.sequence}
    for name, size in sizes.items():
        if size is None:
            raise ConfigurationError(NO_BATCH.format({"batch": "global batch", "seq": "sequence length"}[name], name))
    options = plan_options(uniform)
    with progress_line():
        module, inputs = load_model(model, int(sizes["batch"] or 0), int(sizes["seq"] or 0))
        found = make_plan(module, inputs, cluster=where, optimizer=OPTIMIZERS[optimizer], **options)
        if uniform.stages:
            found = found.edit(stage_edits(uniform.stages, found))
    asked = {**options, "dims": ",".join(f"{axis}={size}" for axis, size in options["dims"].items()), "constraints": []}
    asked = {name: value for name, value in asked.items() if value is not None or name not in ONLY_ASKED}
    question = {"model": model, "cluster_text": cluster, "optimizer": optimizer, **sizes, **asked}
    found = found.with_(question={**found.question, **question})
    if output is not None:
        found.save(output)
    print_plan(found, as_json, last_line=what_became_of(output))
