"""Sizes of buckets: what saves starts without losing overlap; what is played is what the simulator plays."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar.capture import capture
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.program_costs import COMPUTE, program_actions
from autopar.cost_models.program_timeline import issued, wait_positions
from autopar.cost_models.simulator import simulate
from autopar.graphs.forward_backward import Partition
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import CollectiveFit
from autopar.layouts.placement import Mesh
from autopar.passes.lowering.step_halves import split_forward_backward
from autopar.passes.overlap.in_symmetric_memory import both_in_symmetric_memory
from autopar.passes.overlap.overlapped import overlapped
from autopar.planner.one_mesh import bucket_sizes
from autopar.planner.one_mesh.bucket_sizes import CHUNKS, LEAST_GAIN, Issue, issues
from tests.passes.lowered_programs import lower
from tests.passes.lowering.test_lower import Case, all_replicated, data_parallel, zero3
from tests.passes.tokens import FLAT, Gated, Tokens, sequence_parallel, split_as_megatron_does

MESH = Mesh(("dp",), (4,))


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = ((self.layers(x) - y) ** 2).mean()
        return loss


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)
    return Case(Deep(), {"x": torch.randn(8, 64), "y": torch.randn(8, 64)})


def partition(case: Case, parameter: object) -> Partition:
    return split_forward_backward(lower(case.program, data_parallel(case, MESH, parameter), 0))


def runs(parts: Partition) -> list[tuple[str, fx.GraphModule, int]]:
    return [(phase, each, 1) for phase, each in zip(("forward", "backward"), parts.graphs, strict=True)]


def network(latency_seconds: float, bytes_per_second: float) -> Cluster:
    cluster = Cluster.parse("4x1 cpu")
    link = replace(cluster.inter_link, latency_seconds=latency_seconds, bytes_per_second=bytes_per_second, fits=())
    return replace(cluster, inter_link=link)


def found(case: Case, parameter: object, cluster: Cluster) -> list[Issue]:
    return list(issues(runs(partition(case, parameter)), cluster=cluster, mesh=MESH, backend="eager"))


def test_latency_asks_for_large_buckets(case: Case) -> None:
    best, *others = found(case, all_replicated, network(1e-2, 1e9))
    assert best.bucket_bytes
    assert all(best.seconds <= other.seconds for other in others)
    alone = next(issue for issue in others if not issue.bucket_bytes)
    assert best.seconds < alone.seconds / 4  # 12 gradients and the loss, one after the other


def test_a_network_without_latency_asks_for_none(case: Case) -> None:
    cluster = network(0.0, 1e6)
    cluster = replace(cluster, inter_link=replace(cluster.inter_link, fits=free_starts()))
    assert not found(case, all_replicated, cluster)[0].bucket_bytes


def free_starts(bytes_per_second: float = 1e6) -> tuple[CollectiveFit, ...]:
    return tuple(
        CollectiveFit(kind=kind, ranks=4, latency_seconds=1e-9, bytes_per_second=bytes_per_second, source="test")
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
    )


@pytest.mark.parametrize("parameter", [all_replicated, zero3])
def test_what_is_played_is_the_program_that_runs(case: Case, parameter: object) -> None:
    cluster = network(1e-3, 1e7)
    for issue in found(case, parameter, cluster):
        program = overlapped(partition(case, parameter), issue.bucket_bytes)
        assert issue.seconds == pytest.approx(seconds_of(program, cluster), rel=1e-9)


def seconds_of(program: Partition, cluster: Cluster, mesh: Mesh = MESH) -> float:
    """Of both passes of a program, priced and played as `autopar simulate` does."""
    total = 0.0
    for phase, part in zip(("forward", "backward"), program.graphs, strict=True):
        actions = program_actions(
            part.graph, phase, cluster=cluster, mesh=mesh, backend="eager",
            prices=KernelPrices(device=cluster.device), segment_of=str,
        )  # fmt: skip
        assert any(action.stream == COMPUTE for action in actions)
        total += simulate(issued(actions, wait_positions(part.graph.nodes))).makespan_seconds
    return total


def test_joining_moves_no_byte_more(case: Case) -> None:
    plain = partition(case, zero3)
    sums = []
    for sizes in ({}, dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 1e9)):
        moved = 0.0
        for phase, part in zip(("forward", "backward"), overlapped(plain, sizes).graphs, strict=True):
            actions = program_actions(
                part.graph, phase, cluster=Cluster.parse("4x1 cpu"), mesh=MESH, backend="eager",
                prices=KernelPrices(device=Cluster.parse("4x1 cpu").device), segment_of=str,
            )  # fmt: skip
            moved += sum(action.nbytes for action in actions if action.stream != COMPUTE)
        sums.append(moved)
    assert sums[0] == sums[1] > 0


@pytest.mark.parametrize("parameter", [all_replicated, zero3])
def test_what_takes_the_least_memory_comes_last_and_hides_nothing(case: Case, parameter: object) -> None:
    last = found(case, parameter, network(1e-3, 1e7))[-1]
    assert last.bucket_bytes is None
    assert last.seconds == pytest.approx(last.compute_seconds + last.exposed_communication_seconds)


def test_sizes_that_hold_too_much_are_left_out_and_smaller_ones_kept(case: Case) -> None:
    cluster, passes = network(1e-2, 1e9), runs(partition(case, all_replicated))
    asked: list[float] = []

    def up_to(most: float) -> list[float | None]:
        def fits(issue: Issue) -> bool:
            asked.append(max((issue.bucket_bytes or {"": 0.0}).values()))
            return asked[-1] <= most

        asked.clear()
        found = issues(passes, cluster=cluster, mesh=MESH, backend="eager", fits=fits)
        return [issue.bucket_bytes and max(issue.bucket_bytes.values()) for issue in found]

    everything = up_to(math.inf)
    assert len(everything) > 2
    assert len(asked) == 1
    largest, *_ = everything
    assert largest is not None
    assert up_to(largest / 2) == [{}, None], "smaller sizes are slower than none here"
    assert up_to(-1.0) == [None]
    assert asked == [largest, 0.0], "where it does not fit without buckets, no other size does"


@pytest.fixture(scope="module")
def wide() -> Partition:
    """A column-parallel and a row-parallel layer of width 512 on 1,024 tokens."""
    torch.manual_seed(0)
    tokens = Case(Tokens(512), {name: torch.randn(8, 128, 512) for name in ("x", "y")})
    return split_forward_backward(lower(tokens.program, sequence_parallel(tokens, 0), 0))


def in_tensor_parallel(wide: Partition, cluster: Cluster) -> list[Issue]:
    return list(issues(runs(wide), cluster=cluster, mesh=Mesh(("tp",), (4,)), backend="eager"))


def test_large_products_over_slow_links_run_in_chunks(wide: Partition) -> None:
    cluster = network(1e-4, 1e9)
    best, whole, *_ = in_tensor_parallel(wide, cluster)
    assert set(best.chunks) <= {"all_gather", "reduce_scatter"}
    assert all(count in CHUNKS for count in best.chunks.values())
    assert best.seconds < (1 - LEAST_GAIN) * whole.seconds
    assert not whole.chunks
    program = overlapped(wide, best.bucket_bytes, best.chunks)
    assert best.seconds == pytest.approx(seconds_of(program, cluster, Mesh(("tp",), (4,))), rel=1e-9)


def test_collectives_that_are_all_start_and_those_that_take_no_time_are_not_cut(wide: Partition) -> None:
    for cluster in (network(0.1, 1e12), Cluster.parse("1x4 H100-SXM")):
        assert not any(issue.chunks for issue in in_tensor_parallel(wide, cluster))


@pytest.fixture(scope="module")
def gated() -> Partition:
    """A gated layer of width 2,048 on 4,096 tokens in bf16, split as Megatron does."""
    with torch.device("meta"):
        model = Gated(2048, 8192).bfloat16()
        inputs = {name: torch.randn(1, 4096, 2048, dtype=torch.bfloat16) for name in ("x", "y")}
    program = capture(model, (), inputs)
    return split_forward_backward(lower(program, split_as_megatron_does(program, FLAT, 1), 0))


def test_products_run_in_symmetric_memory_inside_a_node_of_gpus_with_nvlink(gated: Partition) -> None:
    cluster = Cluster.parse("1x4 H100-SXM")
    best, *others = issues(runs(gated), cluster=cluster, mesh=FLAT, backend="inductor")
    assert best.symmetric == {"all_gather": ("tp",), "reduce_scatter": ("tp",)}
    assert not any(issue.symmetric for issue in others)
    assert best.seconds < (1 - LEAST_GAIN) * min(issue.seconds for issue in others)
    for elsewhere in ("4x1 H100-SXM", "1x4 A10G", "4 cpu"):
        found = list(issues(runs(gated), cluster=Cluster.parse(elsewhere), mesh=FLAT, backend="eager"))
        assert not any(issue.symmetric for issue in found), elsewhere


def test_what_saves_less_than_asked_for_is_not_taken(gated: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_sizes, "LEAST_GAIN", 0.5)
    for issue in issues(runs(gated), cluster=Cluster.parse("1x4 H100-SXM"), mesh=FLAT, backend="inductor"):
        assert not issue.symmetric


def test_what_is_played_in_symmetric_memory_is_the_program_that_runs(gated: Partition) -> None:
    cluster = Cluster.parse("1x4 H100-SXM")
    best = next(issues(runs(gated), cluster=cluster, mesh=FLAT, backend="eager"))
    assert best.symmetric
    program = overlapped(both_in_symmetric_memory(gated, best.symmetric), best.bucket_bytes, best.chunks)
    assert best.seconds == pytest.approx(seconds_of(program, cluster, FLAT), rel=1e-9)


def test_links_that_take_no_time_ask_for_no_symmetric_memory(gated: Partition) -> None:
    cluster = Cluster.parse("1x4 H100-SXM")
    free = replace(cluster.intra_link, bytes_per_second=1e18, latency_seconds=0.0, fits=free_starts(1e18))
    free = replace(free, traits=replace(free.traits, ring_rates=(), startup_seconds=0.0, pass_seconds_per_byte=0.0))
    for issue in issues(runs(gated), cluster=replace(cluster, intra_link=free), mesh=FLAT, backend="inductor"):
        assert not issue.symmetric


def test_computation_beside_a_collective_takes_as_much_longer_as_was_measured(case: Case) -> None:
    cluster = network(0.0, 1e9)  # reductions take 50 times as long as computation, and hide it
    free = found(case, all_replicated, cluster)
    slowed = found(case, all_replicated, replace(cluster, overlap_slowdown=100.0))

    def one_by_one(issues: list[Issue], sizes: object) -> float:
        return next(issue.seconds for issue in issues if issue.bucket_bytes == sizes)

    beside = one_by_one(slowed, {}) - one_by_one(free, {})
    assert 0.0 < beside <= 99.0 * max(issue.compute_seconds for issue in free)
    assert one_by_one(slowed, None) == pytest.approx(one_by_one(free, None), rel=1e-12)  # as lowered, nothing is beside
