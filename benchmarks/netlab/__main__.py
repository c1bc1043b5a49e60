"""`python -m benchmarks.netlab --preset flat-200mbit -- COMMAND...`: a command on every rank of an emulated cluster.

    python -m benchmarks.netlab --preset two-by-two -- autopar profile --force       # measure the network, once
    python -m benchmarks.netlab --preset two-by-two -- python train.py               # Cluster.detect() finds that

Ranks get what torchrun would give them. Bytes per link are printed at the end (`--json`: as JSON on standard output).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from autopar.errors import AutoparError
from benchmarks.netlab.lab import Lab, Outcome
from benchmarks.netlab.machine import why_unavailable
from benchmarks.netlab.presets import PRESETS, Network
from benchmarks.netlab.processes import ended_by_signals


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--preset", type=click.Choice(list(PRESETS)), default="flat-200mbit", show_default=True)
@click.option("--nodes", type=int, help="Nodes, instead of the preset's.")
@click.option("--ranks", "ranks_per_node", type=int, help="Ranks per node.")
@click.option("--mbit", type=float, help="Rate of a node's link in Mbit/s, per direction.")
@click.option("--latency-us", type=float, help="One way, in microseconds.")
@click.option("--cores", "cores_per_rank", type=float, help="Share of a core per rank; 0: no limit.")
@click.option("--seconds", default=600.0, show_default=True, help="The command is ended after so long.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.argument("command", nargs=-1, required=True)
def main(preset: str, seconds: float, as_json: bool, command: tuple[str, ...], **numbers: float | None) -> None:
    """Run COMMAND on every rank of an emulated cluster."""
    if (reason := why_unavailable()) is not None:
        raise click.ClickException(reason)
    try:
        network = changed(PRESETS[preset], numbers)
        with ended_by_signals(), Lab(network) as lab:
            outcome = lab.run(command, seconds=seconds)
    except AutoparError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        print(json.dumps(content(network, outcome)))
    else:
        Console(stderr=True).print(_table(network, outcome))


def changed(network: Network, numbers: dict[str, float | None]) -> Network:
    """The preset with the numbers that were given; rates of single nodes are kept while the nodes are."""
    given: dict[str, Any] = {name: number for name, number in numbers.items() if number is not None}
    if given.get("cores_per_rank") == 0:
        given["cores_per_rank"] = None
    return replace(network, **given)


def content(network: Network, outcome: Outcome) -> dict[str, Any]:
    """What happened, for JSON."""
    return {
        "network": network.name,
        "seconds": outcome.seconds,
        "payload_bytes": outcome.link_bytes.payload.tolist(),
        "packet_bytes": outcome.link_bytes.packets.tolist(),
        "dropped_packets": int(outcome.link_bytes.dropped.sum()),
    }


def _table(network: Network, outcome: Outcome) -> Table:
    table = Table(title=f"{network.name}: MB of payload from node to node, in {outcome.seconds:.1f} s")
    table.add_column("from")
    for node in range(network.nodes):
        table.add_column(f"to {node}", justify="right")
    for node, row in enumerate(outcome.link_bytes.payload.tolist()):
        table.add_row(str(node), *(f"{size / 1e6:.2f}" for size in row))
    return table


if __name__ == "__main__":
    sys.exit(main())
