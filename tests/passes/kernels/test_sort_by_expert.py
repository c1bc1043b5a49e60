"""Rows of expert layers are sorted once: every gradient as without, fewer rows moved, nothing else reordered."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autopar.capture import capture
from autopar.layouts.placement import Mesh
from autopar.passes.kernels.graph_patterns import name_of, shape_of
from autopar.passes.lowering import chain as lowering
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.rules.rule import Rule
from tests.passes.hand_plans import Results, hand_plan, picked, run_plan, tensors_of, worst
from tests.passes.lowered_programs import lower

WIDTH, HIDDEN, EXPERTS, CHOSEN, TOKENS = 8, 24, 4, 2, 32
ROWS = TOKENS * CHOSEN


class Experts(nn.Module):
    """A layer of gated experts: every token goes to `CHOSEN` of them, their outputs are weighted and summed."""

    def __init__(self, with_bias: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN)) if with_bias else None

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.router(x).softmax(-1), CHOSEN, dim=-1)
        ids = chosen.reshape(-1)
        rows = x.unsqueeze(1).expand(-1, CHOSEN, -1).reshape(-1, WIDTH)
        rows = torch.ops.autopar.expert_linear(rows, self.up, ids, False)
        if self.bias is not None:
            rows = rows + functional.embedding(ids, self.bias)
        gate, rows = rows.chunk(2, -1)
        rows = torch.ops.autopar.expert_linear(functional.silu(gate) * rows, self.down, ids, False)
        return (rows * weights.reshape(-1, 1)).view(len(x), CHOSEN, -1).sum(1)


class Layers(nn.Module):
    """Two layers of experts with residuals: (TOKENS, WIDTH) -> mean square."""

    def __init__(self, with_bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(with_bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class OnePerToken(nn.Module):
    """One expert per token, beside other rows that are as many as those of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        ids = x.argmax(-1) % EXPERTS
        return self.head(x.flip(0) + torch.ops.autopar.expert_linear(x, self.weight, ids, False)).square().mean()


class GivenExperts(nn.Module):
    """The expert of every token is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return torch.ops.autopar.expert_linear(x, self.weight, ids, False).square().mean()


class Outer(nn.Module):
    """The same rows on both sides: (rows, WIDTH) -> (EXPERTS, WIDTH, WIDTH)."""

    def forward(self, x: Tensor) -> Tensor:
        ids = x.argmax(-1) % EXPERTS
        return torch.ops.autopar.expert_outer(x, x, ids, EXPERTS, False)


def captured(module: nn.Module, tokens: int = TOKENS) -> tuple[Program, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    inputs = {"x": torch.randn(tokens, WIDTH, generator=generator)}
    if isinstance(module, GivenExperts):
        inputs["ids"] = torch.randint(0, EXPERTS, (TOKENS,), generator=generator)
    program = capture(module, (), inputs)
    return program, tensors_of(program, module, inputs)


def split(program: Program, how: str) -> Plan:
    """The plan of "one" rank; or of two: each has a block of the "experts", or what is drawn by another word."""
    rng, mesh = random.Random(how), Mesh(("tp",), (1 if how == "one" else 2,))

    def pick(node: fx.Node, rule: Rule) -> list[str | None]:
        if how in ("one", "experts"):
            return ["e" if "e" in rule.names and how == "experts" else None]
        return [rng.choice([None, *rule.names])]

    return hand_plan(program, mesh, picked(program, mesh, pick))


def layers(with_bias: bool) -> Layers:
    torch.manual_seed(0)
    return Layers(with_bias)


def named(program: Program, plan: Plan, *names: str) -> list[fx.Node]:
    return [node for node in lower(program, plan, 0).graph.nodes if name_of(node) in names]


def unsorted(program: Program, plan: Plan, tensors: dict[str, Tensor], patch: pytest.MonkeyPatch) -> Results:
    with patch.context() as without:
        without.setattr(lowering, "sort_by_expert", lambda *_: None)
        assert not named(program, plan, "expert_order")
        return run_plan(program, plan, tensors)


@pytest.mark.exhaustive(sample=["experts", "one"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("how", ["one", "experts", "first draw", "second draw", "third draw"])
def test_every_gradient_is_as_without(how: str, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program, tensors = captured(layers(with_bias))
    plan = split(program, how)
    assert named(program, plan, "expert_order")
    assert worst(run_plan(program, plan, tensors), unsorted(program, plan, tensors, monkeypatch)) < 1e-5


def test_recomputed_layers_sort_again_and_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    program, tensors = captured(layers(True))
    plan = split(program, "one")
    again = [name for name in plan.operators if name.startswith("layers.0/") and "/bwd" not in name]
    found = run_plan(program, plan, tensors, recompute=again)
    backward = found.partitions[0].backward
    assert backward is not None
    assert sum(name_of(node) == "expert_order" for node in backward.graph.nodes) == 1
    assert worst(found, unsorted(program, plan, tensors, monkeypatch)) < 1e-5


def test_what_lies_between_products_stays_in_order() -> None:
    program, _ = captured(layers(False))
    plan = split(program, "one")
    assert len(named(program, plan, "expert_order")) == 2
    assert not named(program, plan, "expert_linear", "expert_outer", "clone")
    wide = [node for node in named(program, plan, "rows_at") if shape_of(node)[1:] != (1,)]
    # of each layer: tokens in, result out; gradient of the result in, and of the second layer that of its tokens out
    assert [shape_of(node) for node in wide] == [(ROWS, WIDTH)] * 7
    assert sorted(shape_of(node.args[0])[0] for node in wide) == [TOKENS] * 4 + [ROWS] * 3


def test_biases_are_looked_up_in_order() -> None:
    program, _ = captured(layers(True))
    plan = split(program, "one")
    assert [name_of(node.args[1]) for node in named(program, plan, "embedding")] == ["rows_at"] * 2
    widths = {shape_of(node)[1:] for node in named(program, plan, "rows_at")}
    assert widths == {(), (1,), (WIDTH,)}  # of ids, routing weights and tokens; nothing hidden is moved


def test_rows_are_put_back_in_front_of_as_many_others() -> None:
    torch.manual_seed(0)
    program, _ = captured(OnePerToken())
    products = named(program, split(program, "one"), "sorted_expert_linear")
    (product,) = (node for node in products if node.meta["phase"] == "forward")
    (back,) = product.users
    assert name_of(back) == "rows_at"
    assert [name_of(user) for user in back.users] == ["add"]


def test_experts_that_are_an_input_are_sorted_behind_all_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    program, tensors = captured(GivenExperts())
    plan = split(program, "experts")
    kinds = [node.op for node in lower(program, plan, 0).graph.nodes]
    assert kinds.index("call_function") == kinds.count("placeholder")
    assert worst(run_plan(program, plan, tensors), unsorted(program, plan, tensors, monkeypatch)) < 1e-5


def test_a_sum_over_as_many_rows_as_experts_is_not_taken_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    program, tensors = captured(Outer(), tokens=EXPERTS)
    plan = split(program, "one")
    (found,) = run_plan(program, plan, tensors).outputs.values()
    (wanted,) = unsorted(program, plan, tensors, monkeypatch).outputs.values()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("wrong", ["first expert", "places"])
def test_a_wrong_order_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if wrong == "first expert" and name_of(node) == "expert_order":
                node.args = (*node.args[:2], 1)
            elif wrong == "places" and name_of(node) == "getitem" and name_of(node.args[0]) == "expert_order":
                node.args = (node.args[0], 0 if node.args[1] == 1 else node.args[1])

    program, tensors = captured(layers(False))
    plan = split(program, "one")
    found = run_plan(program, plan, tensors, change=spoil)
    assert worst(found, unsorted(program, plan, tensors, monkeypatch)) > 1e-3
