"""Stages: where operators and gradients stand, and what crosses."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import Captures
from autopar.errors import PlanMismatchError
from autopar.hardware.cluster import Cluster
from autopar.passes.stages.cut_stages import Crossing, StagePrograms, cut_stages
from autopar.planner.batch.micro_batch_program import in_parts
from autopar.program import MicroProgram, Program
from autopar.questions import capture_model
from autopar.request import Request
from benchmarks.plan_quality.models import mixture
from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import block_ends, micro_program


def _micro(name: str) -> MicroProgram:
    return micro_program(name, 4)


def _cut(name: str) -> StagePrograms:
    micro = _micro(name)
    return cut_stages(micro.program, block_ends(micro, CASES[name].quarters))


def _ways(stages: StagePrograms, backward: bool) -> list[tuple[int, int]]:
    return sorted((c.source, c.target) for c in stages.crossings if c.is_backward == backward)


@pytest.fixture(scope="module")
def tied() -> StagePrograms:
    return _cut("gpt2")


def test_a_chain_sends_one_value_to_the_next_stage_and_one_gradient_back(tied: StagePrograms) -> None:
    assert _ways(tied, backward=False) == [(0, 1), (1, 2), (2, 3)]
    assert _ways(tied, backward=True) == [(1, 0), (2, 1), (3, 2)]


def test_a_tied_parameter_stands_on_both_stages_and_each_returns_its_part(tied: StagePrograms) -> None:
    assert tied.holders["transformer.wte.weight"] == {0, 3}
    with_gradient = [
        stage
        for stage, program in enumerate(tied.programs)
        if any(o.role == "gradient" and o.name == "transformer.wte.weight" for o in program.outputs)
    ]
    assert with_gradient == [0, 3]


def test_every_other_parameter_stands_on_one_stage_with_its_gradient(tied: StagePrograms) -> None:
    for stage, program in enumerate(tied.programs):
        mine = {value.name for value in program.inputs if value.role == "parameter"}
        gradients = {o.name for o in program.outputs if o.role == "gradient" and o.name in tied.holders}
        assert mine == gradients == {name for name, holders in tied.holders.items() if stage in holders}


def test_statistics_need_no_parameter(tied: StagePrograms) -> None:
    assert tied.statistics is not None
    assert [value.role for value in tied.statistics.inputs] == ["input"]


def test_a_long_skip_and_its_gradient_go_straight() -> None:
    stages = _cut("skips")
    assert (0, 3) in _ways(stages, backward=False)
    assert (3, 0) in _ways(stages, backward=True)
    assert (0, 2) not in _ways(stages, backward=False)


def test_the_encoder_reaches_every_decoder_stage() -> None:
    stages = _cut("t5")
    encoded = [c for c in stages.crossings if c.source == 1 and not c.is_backward and "encoder" in c.name]
    assert sorted(c.target for c in encoded) == [2, 3]


def test_the_copies_of_a_gradient_for_the_experts_are_made_behind_the_border() -> None:
    """The gradient of the sum over a token's two experts is twice the gradient of the sum, which the residual needs."""
    torch.manual_seed(0)
    model = mixture(layers=2, width=16, hidden=32, heads=2, experts=4, chosen=2, vocabulary=32)
    batch = {name: torch.randint(0, 32, (8, 6)) for name in ("x", "labels")}
    request = Request(cluster=Cluster.parse("1x1 H100-SXM"))
    captured = capture_model(model, (), batch, request, Captures(), training=True)
    micro = in_parts(captured.program, 4, captured)
    stages = cut_stages(micro.program, block_ends(micro, ["layers.0"]))
    assert _ways(stages, backward=True) == [(1, 0)]


def test_a_pass_of_a_stage_sends_its_own_values_of_its_own_direction() -> None:
    """Of a stage in the middle: forward to the next one, backward to the one before."""
    node = torch.fx.Graph().placeholder("x")
    crossings = tuple(
        Crossing(name=name, source=source, target=target, is_backward=target < source, node=node, readers=())
        for name, source, target in (("x", 0, 1), ("y", 1, 2), ("dx", 1, 0), ("dy", 2, 1))
    )
    stages = StagePrograms(programs=(), statistics=None, crossings=crossings, owners={}, holders={})
    sent = {backward: [c.name for c in stages.crossings_from(1, backward)] for backward in (False, True)}
    received = {backward: [c.name for c in stages.crossings_into(1, backward)] for backward in (False, True)}
    assert (sent, received) == ({False: ["y"], True: ["dx"]}, {False: ["x"], True: ["dy"]})


def test_cuts_that_the_program_does_not_have_are_named() -> None:
    micro = _micro("skips")
    with pytest.raises(PlanMismatchError, match="nowhere/add#0"):
        cut_stages(micro.program, ["nowhere/add#0"])
    with pytest.raises(PlanMismatchError, match="not the order"):
        cut_stages(micro.program, list(reversed(block_ends(micro, ["down.0", "down.1"]))))


def test_stages_compute_what_the_program_computes() -> None:
    micro = _micro("skips")
    stages = cut_stages(micro.program, block_ends(micro, CASES["skips"].quarters))
    model, batch = CASES["skips"].model(), CASES["skips"].batch(0)
    known: dict[str, torch.Tensor] = {
        **dict(model.named_parameters()),
        **{name: tensor[:2] for name, tensor in batch.items()},
    }
    assert stages.statistics is not None
    counts = _run(stages.statistics, known, stages.statistics.returned)
    known.update(zip([output.name for output in stages.statistics.outputs], counts, strict=True))
    for program in stages.programs:
        forward = [node for node, o in zip(program.returned, program.outputs, strict=True) if o.role != "gradient"]
        values = _run(program, known, forward)
        names = [o.name for o in program.outputs if o.role != "gradient"]
        known.update(zip(names, values, strict=True))
    expected = model(**{name: tensor[:2] for name, tensor in batch.items()})["loss"]
    assert torch.allclose(known["loss"], expected)


def _run(program: Program, known: dict[str, torch.Tensor], wanted: list[torch.fx.Node]) -> list[torch.Tensor]:
    """Values of some nodes of a program with global shapes, from its inputs by name."""
    made: dict[torch.fx.Node, torch.Tensor] = {}
    inputs = zip(program.placeholders, program.inputs, strict=True)
    made.update({node: known[value.name] for node, value in inputs if value.name in known})
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "call_function" and all(operand in made for operand in node.all_input_nodes):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
                made[node] = node.target(*args, **kwargs)
    return [made[node] for node in wanted]
