"""Recomputation: what the search may choose, that it is lowered as chosen, and what it saves."""

import functools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.capture import capture
from autopar.errors import InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.ops.dropout_operator import dropout_by_index
from autopar.passes.lowering.step_halves import split_forward_backward
from autopar.passes.overlap.overlapped import overlapped
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.recomputation import RECOMPUTED, SAVED, expand
from autopar.planner.planning import make_plan
from autopar.planner.problem.search_limits import SEARCH
from autopar.request import Request
from tests.passes.hand_plans import run_plan, tensors_of
from tests.passes.lowered_programs import lower
from tests.planner.lifetime_tracker import tracked_peak_bytes
from tests.planner.problems import build

CLUSTER = Cluster.parse("4 H100-SXM")
SIZES = {"vocab_size": 32, "use_cache": False}


def llama():
    sizes = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        **SIZES,
    )
    return LlamaForCausalLM(sizes).double().train()


def gpt2(dropout=0.0):
    sizes = GPT2Config(n_layer=3, n_embd=32, n_head=4, n_positions=32, **SIZES)
    sizes.attn_pdrop = sizes.resid_pdrop = sizes.embd_pdrop = dropout
    return GPT2LMHeadModel(sizes).double().train()


def gpt2_with_dropout():
    return gpt2(dropout=0.3)


@pytest.fixture(autouse=True, scope="module")
def by_the_sum():
    """Plans of the smallest sum of costs: those of other sums, of which the played step decides, cost as much again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SEARCH, "default", replace(SEARCH["default"], hidden_shares=()))
        yield


class Captured:
    """A model with its program, and the plain step."""

    def __init__(self, model):
        ids = torch.randint(0, 32, (8, 32))
        inputs = {"input_ids": ids, "labels": ids}
        self.program = capture(model, (), inputs)
        self.tensors = tensors_of(self.program, model, inputs)
        self.model, self.inputs = model, inputs
        self._plans = {}

    def plan(self, **options):
        """The plan of a question, which several tests ask."""
        asked = repr(sorted(options.items()))
        if asked not in self._plans:
            request = Request(cluster=CLUSTER, with_baselines=False, optimizer="AdamW", **options)
            self._plans[asked] = make_plan(self.program, request)
        return self._plans[asked]

    def run(self, plan):
        return run_plan(self.program, plan, self.tensors, recompute=recomputed(plan))


def recomputed(plan):
    return [name for name, operator in plan.operators.items() if operator.recompute]


@functools.cache
def captured_of(model):
    torch.manual_seed(0)
    return Captured(model())


@pytest.fixture(params=[llama, gpt2], ids=["llama", "gpt2"])
def captured(request):
    return captured_of(request.param)


def partition_of(captured, plan):
    lowered = lower(captured.program, plan, 0)
    return overlapped(split_forward_backward(lowered, recomputed(plan)), plan.bucket_bytes), lowered


@pytest.mark.exhaustive(sample="gpt2-question0")
@pytest.mark.slow
@pytest.mark.parametrize(("model", "question"), [(gpt2, {"mesh": (4,)}), (llama, {"dims": {"dp_shard": 2, "tp": 2}})])
def test_recomputation_changes_neither_loss_nor_gradients_and_saves_memory(model, question):
    captured = captured_of(model)
    loss = captured.model(**captured.inputs).loss
    captured.model.zero_grad()
    loss.backward()
    gradients = {name: p.grad for name, p in captured.model.named_parameters()}
    peaks = {}
    for recompute in ("none", "selective", "full"):
        plan = captured.plan(recompute=recompute, **question)
        results = captured.run(plan)
        assert results.outputs["loss"].item() == pytest.approx(loss.item(), rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(results.gradients[name], gradient, rtol=1e-5, atol=1e-6)
        peaks[recompute] = plan.predicted.peak_bytes
        partition, lowered = partition_of(captured, plan)
        transient = peaks[recompute] - sum(
            plan.predicted.bytes_by_kind[kind] for kind in ("parameters", "optimizer state")
        )
        assert tracked_peak_bytes(partition, lowered) == pytest.approx(transient, rel=0.03)
    assert peaks["full"] < 0.7 * peaks["none"]
    assert peaks["full"] <= peaks["selective"] <= peaks["none"]


@pytest.mark.exhaustive(sample="gpt2")
def test_full_recomputation_saves_nothing_inside_of_a_block(captured):
    plan = captured.plan(mesh=(4,), recompute="full")
    assert str(plan.statistics["recomputed"]).startswith("3 of 3 blocks in full")
    partition, _ = partition_of(captured, plan)
    saved = [value for value in partition.saved if not value.is_input and value.bytes > 1024]
    plain, _ = partition_of(captured, captured.plan(mesh=(4,), recompute="none"))
    assert len(saved) < len([value for value in plain.saved if not value.is_input and value.bytes > 1024]) / 2


def saved_against_the_plan(partition, names):
    """Those of the operators, which backward should compute again, of which forward saves an output."""
    nodes = {node.name: node for node in partition.forward.graph.nodes}
    saved = [nodes[value.name] for value in partition.saved if not value.is_input]
    return {str(node.meta["operator"]) for node in saved if node.meta.get("redistributes") is None} & set(names)


def test_nothing_recomputed_is_saved_and_a_partition_that_does_is_noticed(captured):
    plan = captured.plan(mesh=(4,), recompute="full")
    names, (partition, lowered) = recomputed(plan), partition_of(captured, plan)
    assert not saved_against_the_plan(partition, names)
    for forgotten in [name for name in names if "attention" in name]:
        others = [name for name in names if name != forgotten]
        assert saved_against_the_plan(split_forward_backward(lowered, others), names) == {forgotten}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_tighter_limit_costs_more_and_is_kept():
    captured = captured_of(llama)
    free = captured.plan(mesh=(4,))
    assert not recomputed(free)
    least = captured.plan(mesh=(4,), recompute="full").predicted.peak_bytes
    objectives = [free.objective_seconds]
    for share in (0.6, 0.25):
        limit = least + share * (free.predicted.peak_bytes - least)
        plan = captured.plan(mesh=(4,), memory_limit=limit)
        assert plan.predicted.peak_bytes <= limit
        assert bool(recomputed(plan)) == ("recomputed" in plan.statistics)
        objectives.append(plan.objective_seconds)
    for looser, tighter in pairwise(objectives):
        assert tighter >= looser * (1 - 1e-3)  # searches within memory end a thousandth above the optimum


class Blocks(torch.nn.Module):
    """forward(x (B, 64)) -> mean, through three blocks."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)]
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def test_what_is_computed_again_is_paid_twice_with_its_operands_and_what_is_saved_once():
    """But for a weight: one that backward gathers anyway is paid once."""
    program = capture(Blocks(), (torch.zeros(64, 64),))
    plain = build(program, CLUSTER, Mesh(("inner",), (4,)))
    expanded = expand(plain, Lifetimes(program))
    factors = {SAVED: 1.0, RECOMPUTED: 2.0}
    seen = set()

    def of_state(variable, state):
        return np.flatnonzero(variable.availability == state)

    for before, variable in zip(plain.variables, expanded.variables, strict=True):
        for state, factor in factors.items() if variable.availability is not None else ():
            if len(rows := of_state(variable, state)):
                np.testing.assert_allclose(variable.costs[rows], factor * before.costs)
                seen.add((variable.kind, state))
    assert {("operator", SAVED), ("operator", RECOMPUTED)} <= seen
    read_twice, weights = 0, 0
    for before, edge in zip(plain.problem.edges, expanded.problem.edges, strict=True):
        source, target = (expanded.variables[index] for index in (edge.source, edge.target))
        if target.kind != "operator" or target.availability is None or not before.costs.any():
            continue
        columns = of_state(target, RECOMPUTED)
        if source.kind == "parameter" and source.name.endswith("weight") and len(columns):
            again = 2.0 if source.name == "layers.0.0.weight" else 1.0  # backward makes no gradient of x
            np.testing.assert_allclose(edge.costs[:, columns], again * before.costs)
            weights += 1
        elif source.kind == "operator" and source.availability is not None:
            rows = of_state(source, SAVED)
            np.testing.assert_allclose(
                edge.costs[np.ix_(rows, columns)], 2.0 * before.costs[: len(rows), : len(columns)]
            )
            read_twice += bool(len(rows) and len(columns))
    assert read_twice
    assert weights


def test_what_does_not_fit_names_the_smallest_with_recomputation():
    captured = captured_of(gpt2)
    with pytest.raises(InfeasibleError, match="the smallest needs"):
        captured.plan(mesh=(4,), memory_limit=1e4, mode="fast")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_recomputed_dropout_draws_the_same_masks():
    captured = captured_of(gpt2_with_dropout)
    plain, again = (captured.plan(mesh=(4,), recompute=how) for how in ("none", "full"))
    draws = {name for name in recomputed(again) if "dropout" in name or "draw" in name or "bernoulli" in name}
    assert draws
    first, second = captured.run(plain), captured.run(again)
    torch.testing.assert_close(second.outputs["loss"], first.outputs["loss"])
    for name, gradient in first.gradients.items():
        torch.testing.assert_close(second.gradients[name], gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_a_recomputed_mask_of_other_draws_is_noticed():
    captured = captured_of(gpt2_with_dropout)
    plan = captured.plan(mesh=(4,), recompute="full")
    changed = []

    def draw_others(part):
        for node in part.graph.nodes:
            again = node.meta.get("phase") == "backward" and not str(node.meta["operator"]).endswith("/bwd")
            if again and node.target is dropout_by_index:
                node.args = (*node.args[:3], node.args[3] + 1, *node.args[4:])
                changed.append(node)

    names = recomputed(plan)
    right = run_plan(captured.program, plan, captured.tensors, recompute=names)
    wrong = run_plan(captured.program, plan, captured.tensors, recompute=names, change=draw_others)
    assert changed
    torch.testing.assert_close(wrong.outputs["loss"], right.outputs["loss"])
    differs = [name for name, g in right.gradients.items() if not torch.allclose(wrong.gradients[name], g, rtol=1e-4)]
    assert len(differs) > len(right.gradients) / 2
