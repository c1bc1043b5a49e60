"""The host of a published run: Python, autograd and launches, which tiny kernels wait for.

A host runs ahead of its device, so a pass over a micro-batch takes what the device computes or what the host launches,
whichever is longer. Beside launches a host spends time on every pass (queues of the pipeline, the loss), on every layer
of experts (index kernels that no graph shows, and counts of tokens that it must wait for) and on every step (the
optimizer's loop over buckets, the norm, the log).

    host_of(run, "t0").kernel_seconds        # 62e-6 for Megatron-DeepSpeed on the host of a DGX A100

Constants are of the host of a DGX A100; `PACE` says how much longer another takes. `docs/cost-models.md` tells what
they miss on families of tests that were left out of the fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.validation.runs import TrainingRun
from benchmarks.validation.schemas import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Least seconds of what a host does; all 0 where it never waits."""

    kernel_seconds: float = 0.0
    """Of one kernel of our graph: its launch, and those of the small kernels around it that no graph shows."""
    collective_seconds: float = 0.0
    """Of one collective that compute waits for."""
    pass_seconds: float = 0.0
    """Of one pass of one micro-batch through one model chunk, beside its kernels."""
    experts_seconds: float = 0.0
    """Of one layer of experts in one pass, beside its kernels."""
    step_seconds: float = 0.0
    batch_seconds: float = 0.0
    """Until the next micro-batch is read."""
    runs_ahead: bool = True
    """Else every kernel takes its own time or that of its launch, whichever is longer."""


MEGATRON_HOST = Host(
    kernel_seconds=130e-6,
    collective_seconds=175e-6,
    pass_seconds=1.6e-3,
    experts_seconds=1.6e-3,
    step_seconds=41e-3,
)
"""Megatron Core with Transformer Engine. Fitted on every second test of GPT and experts of width up to 1024 in
e2e_mem_megatron_golden, but those on one tray of GB200."""

HOSTS: Mapping[str, Host] = {
    # kernels: fitted on every 12th row of e2e_vtrain_a100_single; on every 7th, 62-64 us are best where one size of tp,
    # pp, dp or micro-batch is left out, 54 us from the compute-bound width of 2048 alone. collectives: the same rows.
    # A host that runs ahead fits them worse (68 us: 5.1 % in the median, but 23 instead of 15 % at the ninth decile)
    "megatron-deepspeed": Host(kernel_seconds=62e-6, collective_seconds=50e-6, runs_ahead=False),
    "megatron": MEGATRON_HOST,
    "megatron-tests": MEGATRON_HOST,
    "megatron-bridge": MEGATRON_HOST,
}
"""By name of the stack, in seconds."""

OTHER_HOST = Host(kernel_seconds=15e-6, collective_seconds=50e-6)
"""Assumption: eager PyTorch takes 10-20 us a kernel."""

_XEON, _GRACE = 0.73, 0.88
PACE: Mapping[str, float] = {
    "H100-SXM": _XEON,
    "H200-SXM": _XEON,
    "B200-SXM": _XEON,
    "B300-SXM": _XEON,
    "GB200": _GRACE,
    "GB300": _GRACE,
}
"""Seconds against those of a DGX A100 (EPYC 7742) by device, which tells the node's CPU (Xeon 8480C, Grace): fitted
with `MEGATRON_HOST`. Nodes of other GPUs since Hopper have CPUs of those two kinds; 1 where nothing is known."""

TRAY_DEVICES, TRAY_BATCH_SECONDS = 4, 0.2
"""The one-tray jobs of Megatron's tests on GB200 wait this long for each micro-batch, however it is split: their
values are ten times those of the same test on two trays. Fitted on 34 of them; why, no row tells."""


def host_of(run: TrainingRun, tier: Tier) -> Host:
    """The host of a run; idle in the ablation, which knows no fitted constant, and where one graph launches the step.

    Graphs of layers launch their kernels, but not what moves tokens between experts.
    """
    stack, device = run.stack, run.cluster.device.name
    if tier == "physics" or stack.cuda_graph == "step":
        return Host()
    pace = PACE.get(device, 1.0)
    host = HOSTS.get(stack.name, OTHER_HOST)
    launches = 0.0 if stack.cuda_graph == "layers" else pace
    one_tray = stack.name == "megatron-tests" and device == "GB200" and run.cluster.num_devices == TRAY_DEVICES
    return replace(
        host,
        kernel_seconds=host.kernel_seconds * launches,
        collective_seconds=host.collective_seconds * launches,
        pass_seconds=host.pass_seconds * pace,
        experts_seconds=host.experts_seconds * pace,
        step_seconds=host.step_seconds * pace,
        batch_seconds=TRAY_BATCH_SECONDS if one_tray else 0.0,
    )
