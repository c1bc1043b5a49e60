"""Spans: the smallest cut by enumeration, and recomputation across blocks from the plan to the gradients."""

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from autopar.capture import capture
from autopar.hardware.cluster import Cluster
from autopar.passes.lowering.step_halves import split_forward_backward
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.spans import SpanBytes, smallest_spans, spans_in
from autopar.planner.one_mesh.query import Query
from autopar.planner.one_mesh.recovered_problem import recover
from autopar.planner.planning import make_plan
from autopar.planner.problem.search_limits import SEARCH
from autopar.plans.parallel_plan import Plan
from autopar.request import Request
from tests.passes.hand_plans import run_plan, tensors_of
from tests.passes.lowered_programs import lower
from tests.planner.lifetime_tracker import tracked_peak_bytes

DEPTH, ROWS, WIDTH = 36, 1024, 8
ACTIVATION = ROWS * WIDTH * 8


@pytest.fixture(autouse=True, scope="module")
def by_the_sum():
    """Plans of the smallest sum of costs: the chain has no communication that could be taken as hidden."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SEARCH, "default", replace(SEARCH["default"], hidden_shares=()))
        yield


class Chain(torch.nn.Module):
    """forward(x (1024, 8)) -> mean: products and tanh, each layer hands on one tensor that backward reads."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(DEPTH)]
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def chain():
    """The chain, its batch and its program."""
    torch.manual_seed(0)
    model, x = Chain().double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    return model, x, capture(model, (x,))


@cache
def request(**options):
    return Request(cluster=Cluster.parse("1 cpu"), with_baselines=False, micro_batches=1, **options)


@cache
def planned(**options):
    return make_plan(chain()[2], request(**options))


def activations(plan):
    """Bytes beside the states, in activations of the chain."""
    states = plan.predicted.bytes_by_kind["parameters"] + plan.predicted.bytes_by_kind["optimizer state"]
    return (plan.predicted.peak_bytes - states) / ACTIVATION


def random_spans(seed):
    """Bytes of some segments whose values are read a little further."""
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 9))
    saved, made = np.zeros((2, size + 1, size + 1))
    for home, far, held in zip(*random.integers(0, [[size], [4], [9]], (3, 2 * size)), strict=True):
        last = min(home + far, size - 1)
        for first, end in itertools.combinations(range(size + 1), 2):
            if first <= home < end:
                (made if last < end else saved)[first, end] += held
    return SpanBytes(saved=saved, made=made)


@pytest.mark.parametrize("seed", range(40))
def test_the_smallest_cut_is_that_of_an_enumeration(seed):
    spans = random_spans(seed)
    size = len(spans.saved) - 1
    cuts = [(0, *rest) for count in range(size) for rest in itertools.combinations(range(1, size), count)]
    assert spans.peak(smallest_spans(spans)) == pytest.approx(min(map(spans.peak, cuts)))


def test_a_chain_in_full_holds_two_roots_of_its_depth():
    assert planned().predicted.peak_bytes > DEPTH * ACTIVATION
    plan = planned(recompute="full")
    transient = 4  # what runs, and the gradients of what it reads and makes
    assert activations(plan) <= 2 * math.sqrt(DEPTH) + transient
    assert "spans of up to" in str(plan.statistics["recomputed"])


def test_a_limit_far_below_what_blocks_need_is_kept_and_costs_less_than_all_of_it():
    full, free = planned(recompute="full"), planned()
    limit = (full.predicted.peak_bytes + free.predicted.peak_bytes) / 2
    plan = planned(memory_limit=limit)
    assert plan.predicted.peak_bytes <= limit
    assert free.objective_seconds < plan.objective_seconds < full.objective_seconds


def nested():
    """A plan within what the states and nine activations take; spans of one level hold about 16."""
    full = planned(recompute="full")
    return planned(memory_limit=full.predicted.peak_bytes - (activations(full) - 9) * ACTIVATION)


@pytest.mark.parametrize("plan_of", [lambda: planned(recompute="full"), nested], ids=["spans", "nested"])
def test_loss_and_gradients_stay_and_the_program_holds_what_is_predicted(plan_of):
    model, x, program = chain()
    plan = plan_of()
    assert bool(plan.recomputed_at) == (plan_of is nested)
    found = run_plan(program, plan, tensors_of(program, model, {"args.0": x}), recompute=tuple(plan.recomputed))
    loss = model(x)
    model.zero_grad()
    loss.backward()
    assert found.outputs["loss"].item() == pytest.approx(loss.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-12, atol=1e-15)
    lowered = lower(program, plan, 0)
    held = tracked_peak_bytes(split_forward_backward(lowered, plan.recomputed, plan.recomputed_at), lowered)
    assert held == pytest.approx(activations(plan) * ACTIVATION, rel=0.02)


@pytest.mark.parametrize("plan_of", [lambda: planned(recompute="full"), nested], ids=["spans", "nested"])
def test_a_plan_with_spans_is_found_again_with_its_price(plan_of, tmp_path):
    plan = plan_of()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    found = recover(Query.of(chain()[2], request()), plan)
    assert found.objective == pytest.approx(plan.objective_seconds)


def test_spans_are_read_off_what_is_recomputed():
    plan = planned(recompute="full")
    segments = Lifetimes(chain()[2])
    spans = spans_in(segments, plan.recomputed)
    assert 2 < max(segments.joined(spans).lengths) < DEPTH
    assert spans_in(segments, ()) == tuple(range(len(segments.segments.names)))


def test_a_model_without_blocks_is_cut_between_its_modules():
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(16)]
    model = torch.nn.Sequential(*(part for layer in layers for part in layer)).double()
    x = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    program = capture(model, (x,), loss_fn=lambda y, batch: y.square().mean())
    saved, again = (make_plan(program, request(recompute=how)) for how in ("none", "full"))
    assert activations(saved) > 16
    assert activations(again) <= 2 * math.sqrt(16) + 4
