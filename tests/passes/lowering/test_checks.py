"""The checker of lowered graphs catches every kind of fault that a pass could make."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from autopar.capture import capture
from autopar.layouts.placement import Mesh, Replicate, Shard
from autopar.passes.lowering import chain
from autopar.passes.lowering.chain import LOWERING, lowered_step, split
from autopar.passes.lowering.checks import CheckFailed, check_graph, check_ranks, check_stage, collective_order
from autopar.passes.lowering.stage import LoweredStage
from autopar.plans.parallel_plan import Plan
from tests.passes.hand_plans import hand_plan

MESH = Mesh(("dp", "tp"), (2, 2))
R = Replicate()
_c10d = torch.ops._c10d_functional


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.proj = nn.Linear(8, 4)

    def forward(self, x):
        return self.proj(nn.functional.gelu(self.fc(x))).sum()


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    return capture(Mlp(), (), {"x": torch.randn(4, 6)})


@pytest.fixture(scope="module")
def plan(program) -> Plan:
    """Columns of the first product over tp: its gradient sums, the second one reads it whole."""
    made = hand_plan(program, MESH, {})
    parameters = dict(made.parameters)
    parameters["fc.weight"] = replace(parameters["fc.weight"], stored=(R, Shard(0)))
    return made.with_(parameters=parameters)


def stage_of(program, plan, rank=0, until=split) -> LoweredStage:
    return lowered_step(program, plan, rank, until=until).only


def call(stage, target):
    return next(n for m in stage.graphs.values() for n in m.graph.nodes if n.target is target)


def test_what_the_lowering_makes_passes(program, plan):
    for rank in range(MESH.size):
        check_stage(stage_of(program, plan, rank, LOWERING[-1]), "a test")


def test_a_wrong_shape_is_noticed(program, plan):
    stage = stage_of(program, plan)
    node = call(stage, torch.ops.aten.gelu.default)
    node.meta["local_shape"] = (*node.meta["local_shape"][:-1], 3)
    with pytest.raises(CheckFailed, match=r"gelu.* says .*3\) float32, of its operands it makes"):
        check_stage(stage, "a test")


def test_a_wrong_dtype_is_noticed(program, plan):
    stage = stage_of(program, plan)
    call(stage, torch.ops.aten.gelu.default).meta["dtype"] = torch.float64
    with pytest.raises(CheckFailed, match=r"says .* float64"):
        check_stage(stage, "a test")


def test_of_what_attention_makes_only_the_result_must_be_the_same_on_all_devices():
    graph = fx.Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    for node in (q, k, v):
        node.meta |= {"local_shape": (1, 2, 4, 8), "dtype": torch.float32}
    called = graph.call_function(torch.ops.aten._scaled_dot_product_efficient_attention.default, (q, k, v, None, True))
    graph.output(called)
    kept = [(1, 2, 4), (), ()], [torch.float64, torch.int64, torch.int64]  # torch pads the rows, and says float32
    called.meta |= {"local_shape": [(1, 2, 4, 8), *kept[0]], "dtype": [torch.float32, *kept[1]]}
    check_graph(graph, MESH, "a test")
    called.meta["local_shape"][0] = (1, 2, 4, 7)
    with pytest.raises(CheckFailed, match=r"a test: .*attention.* says"):
        check_graph(graph, MESH, "a test")


def test_a_value_that_is_read_before_it_is_made_is_noticed(program, plan):
    stage = stage_of(program, plan)
    node = call(stage, torch.ops.aten.gelu.default)
    node.all_input_nodes[0].prepend(node)
    with pytest.raises(CheckFailed, match="which is not made before it"):
        check_stage(stage, "a test")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, "ep"), "are no axes"), ((2, "tp+dp"), "in its order"), ((4, "tp"), "has 4 ranks, it has 2")],
)
def test_groups_are_axes_of_the_mesh_with_their_size(program, plan, arguments, message):
    stage = stage_of(program, plan)
    node = call(stage, _c10d.all_gather_into_tensor.default)
    node.args = (node.args[0], *arguments)
    with pytest.raises(CheckFailed, match=message):
        check_stage(stage, "a test")


def test_a_layout_that_the_plan_does_not_say_is_noticed(program, plan):
    stage = stage_of(program, plan, until=chain.write_local)
    call(stage, torch.ops.aten.gelu.default).meta["layout"] = (R, Shard(1))
    with pytest.raises(CheckFailed, match="the plan says"):
        check_stage(stage, "a test")


def test_saving_what_the_plan_recomputes_is_noticed(program, plan):
    stage = stage_of(program, plan)
    made = {node.name: node for node in stage.program.graph.nodes}
    saved = next(made[value.name] for value in stage.partition.saved if not value.is_input)
    name = str(saved.meta["operator"])
    again = plan.with_(operators={**plan.operators, name: replace(plan.operators[name], recompute=True)})
    with pytest.raises(CheckFailed, match="is saved, but the plan recomputes"):
        check_stage(replace(stage, context=replace(stage.context, plan=again)), "a test")


def test_what_forward_saves_is_what_backward_takes(program, plan):
    stage = stage_of(program, plan)
    taken = list(stage.partition.backward.graph.find_nodes(op="placeholder"))[: len(stage.partition.saved)]
    first, other = next(
        (a, b) for a, b in itertools.pairwise(taken) if a.meta["local_shape"] != b.meta["local_shape"]
    )
    other.append(first)  # the two change places
    with pytest.raises(CheckFailed, match=r"forward saves \w+ as .*, backward takes \w+ as"):
        check_stage(stage, "a test")


def test_ranks_of_a_group_start_the_same_collectives(program, plan):
    stages = {MESH.coordinate(rank): stage_of(program, plan, rank) for rank in range(MESH.size)}
    orders = {place: collective_order(stage.graphs) for place, stage in stages.items()}
    check_ranks(orders, MESH)
    group = next(iter(orders[0, 1]))
    orders[0, 1][group] = [*orders[0, 1][group][1:]]
    with pytest.raises(CheckFailed, match=f"group .*{group.split('+')[-1]}.*: collective 0"):
        check_ranks(orders, MESH)


def test_a_pass_that_breaks_a_graph_is_named(program, plan, monkeypatch):
    def broken(stage: LoweredStage, context: object) -> LoweredStage:
        node = call(stage, torch.ops.aten.gelu.default)
        node.meta["local_shape"] = (1, 1)
        with node.graph.inserting_after(node):
            node.graph.call_function(torch.ops.aten.neg.default, (node,))
        return stage

    monkeypatch.setattr(chain, "LOWERING", (chain.write_local, broken))
    with pytest.raises(CheckFailed, match="behind broken, stage 0, program"):
        lowered_step(program, plan, 0, until=broken)


def test_a_pass_that_changes_a_call_in_its_place_is_noticed(program, plan, monkeypatch):
    def broken(stage: LoweredStage, context: object) -> LoweredStage:
        node = call(stage, torch.ops.aten.gelu.default)
        node.args = node.all_input_nodes[0].args[:1]
        return stage

    monkeypatch.setattr(chain, "LOWERING", (chain.write_local, broken))
    with pytest.raises(CheckFailed, match="behind broken, stage 0, program: gelu"):
        lowered_step(program, plan, 0, until=broken)


def test_nothing_is_checked_where_the_variable_is_not_set(program, plan, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CHECK", "0")
    monkeypatch.setattr("autopar.passes.lowering.observers.check_stage", lambda *_: pytest.fail("checked"))
    lowered_step(program, plan, 0)


def test_a_dump_has_a_file_and_a_difference_per_pass(program, plan, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPAR_DUMP", str(tmp_path))
    lowered_step(program, plan, 1)
    files = sorted(path.name for path in (tmp_path / "rank1-stage0").iterdir())
    assert [name for name in files if name.endswith(".py")] == [
        f"{number:02d}-{each.__name__}.py" for number, each in enumerate(LOWERING)
    ]
    text = (tmp_path / "rank1-stage0" / "03-split.py").read_text()
    assert "def forward(given):" in text
    assert "def backward(given):" in text
    compile(text, "03-split.py", "exec")  # readable Python
    assert "+def backward(given):" in (tmp_path / "rank1-stage0" / "03-split.diff").read_text()
