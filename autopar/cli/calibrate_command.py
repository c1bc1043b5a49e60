"""`autopar calibrate`: refit a cluster from a run that logged its steps beside their prediction.

autopar profile -o job.json                              # or a cluster file, which is what the plan was made for
autopar calibrate job.json run.jsonl -o refitted.json    # run.jsonl: written by autopar.StepLog
autopar plan ... --cluster refitted.json
"""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from autopar.cli.options import OUTPUT_FILE
from autopar.cli.output import as_json_option, print_document
from autopar.cost_models.job_profile import cluster_of_job, read_job_profile
from autopar.cost_models.refit import read_steps, refitted, tiers_of
from autopar.files import decoded_json, file_content
from autopar.hardware.cluster import Cluster
from autopar.report.terminal_tables import table

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("profile", type=FILE)
@click.argument("run", type=FILE)
@click.option("-o", "--output", type=OUTPUT_FILE, required=True, help="Where the cluster file is written.")
@as_json_option
def calibrate(profile: Path, run: Path, output: Path, as_json: bool) -> None:
    """Scale PROFILE (a cluster file, or a job's profile) by measured over predicted of the steps in RUN.

    Example: autopar calibrate job.json run.jsonl -o refitted.json
    """
    tiers = tiers_of(read_steps(run))
    refitted(read_profile(profile), tiers).save(output)
    if as_json:
        print_document({"compute": tiers.compute, "communication": tiers.communication, "cluster": str(output)})
        return
    rows = [("compute", f"{tiers.compute:.3f}"), ("communication", f"{tiers.communication:.3f}")]
    Console().print(table(f"{output}, for --cluster", ("part of a step", "measured / predicted"), rows))


def read_profile(path: Path) -> Cluster:
    """The cluster of a file that `Cluster.save` or `autopar profile -o` in a job wrote. Raises ConfigurationError."""
    document = decoded_json(file_content(path, str(path)), str(path))
    is_profile = isinstance(document, dict) and "machine" in document
    return cluster_of_job(read_job_profile(path)) if is_profile else Cluster.from_file(path)
