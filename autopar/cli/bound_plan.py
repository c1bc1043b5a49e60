"""Bound: a plan file with its model behind it, for the commands that ask more than the file says.

autopar explain plan.json lm_head --vs fsdp        the model, batch, sequence and cluster are those that the file names
autopar memory plan.json --model train:make_model  ... or given beside it
autopar memory plan.json --trust                   the file names a factory, which is code: run it

A plan file is data. What it names as code, `module:factory`, is imported only where `--trust` says so; a configuration
(`hf:CONFIG.json`) is data, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from autopar.cli.options import OPTIMIZERS, planning_arguments, read_cluster
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.later import later
from autopar.plans.parallel_plan import Plan
from autopar.request.model_name import is_configuration

if TYPE_CHECKING:
    from torch import nn

    from autopar.explain.what_if import Planner

Command = TypeVar("Command", bound=Callable[..., Any])
Inputs: TypeAlias = dict[str, Any] | tuple[Any, ...]
load_model: Callable[..., tuple[nn.Module, Inputs]] = later("autopar.capture.models", "load_model")
new_planner: Callable[..., Planner] = later("autopar.explain.what_if", "Planner")
NEEDED = ("model", "batch", "seq")

trust_option = click.option("--trust", is_flag=True, help="Run the factory that the plan file names: it is code.")


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A plan and the planner that holds its model."""

    plan: Plan
    planner: Planner


def given_options(command: Command) -> Command:
    """What may be given in place of what a plan file says of its question."""
    for option in (
        click.option("--cluster", help='"2x8 H100-SXM", a cluster file, or "here". Default: as the plan says.'),
        click.option("--seq", type=click.IntRange(min=1), help="Sequence length. Default: as the plan says."),
        click.option("--batch", type=click.IntRange(min=1), help="Global batch. Default: as the plan says."),
        click.option("--model", help="pkg.module:factory or hf:CONFIG.json. Default: as the plan says."),
        trust_option,
    ):
        command = option(command)
    return command


def says_its_model(plan: Plan, given: Mapping[str, Any]) -> bool:
    """Whether a plan can be bound: its file, or what is given, names model, batch and sequence length."""
    said = said_and_given(plan, given)
    return all(said.get(name) is not None for name in NEEDED)


def said_and_given(plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says of its question, and what is given in place of it."""
    return {**plan.question, **{name: value for name, value in given.items() if value is not None and name != "trust"}}


def needs_trust(plan: Plan, given: Mapping[str, Any]) -> bool:
    """Whether the model is one that the file names as code, and nobody said that it may run."""
    named = plan.question.get("model")
    is_code = isinstance(named, str) and not is_configuration(named)
    return is_code and given.get("model") is None and not given.get("trust")


def bound(path: Path, given: Mapping[str, Any]) -> Bound:
    """The plan of a file, bound. given: `given_options`. Raises ConfigurationError where nothing names the model."""
    plan = Plan.load(path)
    said = said_and_given(plan, given)
    arguments, cluster = asked(said), cluster_of(plan, said, given)
    model, inputs = model_of(plan, given)
    optimizer = said.get("optimizer")
    planner = new_planner(
        model,
        inputs,
        cluster=cluster,
        optimizer=OPTIMIZERS.get(str(optimizer), optimizer),
        precision=said.get("precision"),
        reduce_dtype=said.get("reduce_dtype"),
        branches=said.get("branches"),
    )
    wishes = {name: value for name, value in arguments.items() if name not in ("optimizer", "branches", "reduce_dtype")}
    return Bound(planner.bind(plan, **wishes), planner)


def model_of(plan: Plan, given: Mapping[str, Any]) -> tuple[nn.Module, Inputs]:
    """The model and example inputs of a plan's question. Raises ConfigurationError where it does not name them, and
    where it names code that nobody trusts."""
    said = said_and_given(plan, given)
    missing = [name for name in NEEDED if said.get(name) is None]
    if missing:
        raise ConfigurationError(
            f"the plan does not say its {', '.join(missing)}: it was not made by `autopar plan`; give "
            + " ".join(f"--{name}" for name in missing)
        )
    for name, kind in zip(NEEDED, (str, int, int), strict=True):
        if not isinstance(said[name], kind):
            raise ConfigurationError(f"the plan's question says {name} {said[name]!r}: give --{name}")
    if needs_trust(plan, given):
        raise ConfigurationError(
            f"the plan file names its model as code, {said['model']!r}, and a file is not run unasked: give --trust if "
            f"you know where it is from, or name the model yourself: --model {said['model']}"
        )
    return load_model(said["model"], said["batch"], said["seq"], values=said.get("branches") is not None)


def cluster_of(plan: Plan, said: Mapping[str, Any], given: Mapping[str, Any]) -> Cluster:
    """The cluster of a question. Raises ConfigurationError where it has another number of devices than the plan."""
    text = given.get("cluster") or said.get("cluster_text")
    cluster = read_cluster(str(text)) if text else _named(plan)
    if cluster.num_devices != plan.num_ranks:
        raise ConfigurationError(
            f"the plan has {plan.num_ranks} ranks, {cluster.name} {cluster.num_devices} devices: name its own "
            "cluster; `autopar what-if PLAN --on CLUSTER` plans for another one"
        )
    return cluster


def _named(plan: Plan) -> Cluster:
    """The cluster that a plan names: a description, or the name of this machine. Raises ConfigurationError for the name
    of another machine."""
    try:
        return read_cluster(plan.cluster)
    except ConfigurationError as no_description:
        here = Cluster.detect(plan.num_ranks)
        if here.name == plan.cluster:
            return here
        raise ConfigurationError(
            f"the plan was made on {plan.cluster!r}, which is not this machine ({here.name!r}) and describes no "
            'cluster: give --cluster, a description ("8 H100-SXM"), a file of `autopar profile`, or "here"'
        ) from no_description


def asked(said: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a question that `autopar plan` or `import` wrote, as arguments of `autopar.plan`; of another one
    the memory limit is all that is known."""
    if "cluster_text" not in said:
        return {}
    unsaid = {
        "memory_limit": None, "constraints": (), "discover": False, "branches": None, "deterministic": False,
        "reduce_dtype": None,
    }  # fmt: skip
    arguments = planning_arguments({**unsaid, **said})
    return {**arguments, "mode": said.get("mode", "default")}
