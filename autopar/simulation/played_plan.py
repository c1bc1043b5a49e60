"""Simulate: the step that a plan describes, played kernel by kernel and collective by collective.

    simulation = simulate_plan(plan, program, Cluster.parse("2x8 H100-SXM"), torch.optim.AdamW)
    simulation.step_seconds, simulation.bubble_rate, simulation.peak_bytes
    simulation.timeline.write_chrome_trace("step.json")        # for Perfetto: streams of every rank, bytes over time

The program is lowered as for the runtime, priced by `program_costs` (the planner's own prices) and played by the
simulator, with all micro-batches and, in a pipeline, one rank of every rank group. What the planner predicts is the
same step from its tables; `tests/simulation/test_played_plan.py` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.capture import fingerprint
from autopar.cost_models.simulator import Timeline, simulate
from autopar.errors import ConfigurationError, PlanMismatchError
from autopar.hardware.cluster import Cluster, refuse_mixed
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.plans.parallel_plan import Plan
from autopar.program import MicroProgram, Program
from autopar.simulation.step_program import StepProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One step, on one rank of every rank group."""

    plan: Plan
    timeline: Timeline

    @property
    def step_seconds(self) -> float:
        """From the first action to the end of the last."""
        return self.timeline.makespan_seconds

    @property
    def compute_seconds(self) -> float:
        """Of the rank that computes most."""
        actions = self.timeline.actions
        return max(sum(a.seconds for a in actions if a.rank == rank and not a.communication)
                   for rank in self.timeline.ranks)  # fmt: skip

    @property
    def exposed_communication_seconds(self) -> float:
        """Of the rank that waits most: collectives and transfers beside which it does not compute."""
        return self.timeline.exposed_communication_seconds

    @property
    def bubble_rate(self) -> float:
        """Part of the ranks' time in which they neither compute nor communicate."""
        total = self.step_seconds * len(self.timeline.ranks)
        return 1.0 - sum(map(self.timeline.occupied_seconds, self.timeline.ranks)) / total if total else 0.0

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank group."""
        return tuple(self.timeline.peak_bytes(rank) for rank in self.timeline.ranks)


def simulate_plan(plan: Plan, program: Program | MicroProgram, cluster: Cluster, optimizer: Any) -> Simulation:
    """Play `plan`. program: the captured one, as parts of the batch where the plan has micro-batches or stages.

    optimizer: as `autopar.plan` takes it. Raises PlanMismatchError for another program than the plan's, and
    ConfigurationError for a cluster of another size, or of several kinds of devices where no stages keep to one each.
    """
    return simulate_step(checked_step(plan, program, cluster, optimizer))


def checked_step(plan: Plan, program: Program | MicroProgram, cluster: Cluster, optimizer: Any) -> StepProgram:
    """The step of a plan. Raises as `simulate_plan`."""
    program = with_kernels(program, plan.kernels)
    whole = program.program if isinstance(program, MicroProgram) else program
    if fingerprint(whole) != plan.fingerprint:
        raise PlanMismatchError(
            f"the plan was made for another graph (fingerprint {plan.fingerprint[:12]}, this one is "
            f"{fingerprint(whole)[:12]}): give the model, batch and sequence length that were planned"
        )
    if not plan.in_stages:
        refuse_mixed(cluster, "a step without stages")
    if cluster.num_devices != plan.num_ranks:
        raise ConfigurationError(
            f"the plan runs on {plan.num_ranks} devices, the cluster {cluster.name!r} has {cluster.num_devices}"
        )
    return StepProgram(plan, program, cluster, optimizer)


def simulate_step(step: StepProgram) -> Simulation:
    """Play the step of a plan that belongs to its program and cluster."""
    return Simulation(plan=step.plan, timeline=simulate(step.actions(), step.beside))
