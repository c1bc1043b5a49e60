"""Mixed precision: what is cast where, and which dtypes the collectives of a plan move."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from autopar.capture import capture, fingerprint
from autopar.capture.precision import canonical_names, computing_in
from autopar.demo.gpt import GPT, GPTConfig
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.passes.tidy.place_casts import is_cast
from autopar.planner.planning import make_plan
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.request import Request
from tests.passes.lowered_programs import lower

BF16, FP32 = torch.bfloat16, torch.float32
CLUSTER = Cluster.parse("1x4 H100-SXM")
SUMS = ("all_reduce", "reduce_scatter_tensor")


class Mixed(nn.Module):
    """A batch norm, a wide buffer that meets activations, and a bias that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 4)
        self.second.bias.requires_grad_(False)
        self.register_buffer("offset", torch.ones(16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.second(self.norm(self.first(x)) + self.offset)
        return {"loss": functional.mse_loss(out, y), "out": out}


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=32, positions=8, width=16, heads=4, layers=1))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 32, (2, 8, 8), generator=generator)
    return drawn[0], drawn[1]


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(gpt(), tokens(), precision="bf16")


def planned(program: Program, dims: dict[str, int]) -> Plan:
    return make_plan(program, Request(cluster=CLUSTER, dims=dims, with_baselines=False))


def collectives(program: Program, plan: Plan) -> list[tuple[str, str, torch.dtype, fx.Node]]:
    """(kind, phase, dtype that is moved, node) of every collective of rank 0."""
    nodes = [n for n in lower(program, plan, 0).graph.nodes if getattr(n.target, "namespace", "") == "_c10d_functional"]
    return [
        (n.target._schema.name.split("::")[1], n.meta["phase"], n.args[0].meta["dtype"], n)
        for n in nodes
        if "wait" not in str(n.target)
    ]


def test_each_parameter_is_cast_once_and_read_through_the_cast(program: Program) -> None:
    for node, entry in zip(program.placeholders, program.inputs, strict=True):
        if entry.role == "parameter":
            assert entry.dtype == FP32
            assert [is_cast(user) and user.meta["val"].dtype == BF16 for user in node.users] == [True], entry.name


def test_tied_weights_share_one_cast_and_keep_both_names(program: Program) -> None:
    entry = next(value for value in program.inputs if value.name == "tokens.weight")
    assert entry.aliases == ("head.weight",)


def test_products_are_narrow_loss_and_gradients_are_wide(program: Program) -> None:
    products = [n for n in program.graph.nodes if n.target is torch.ops.aten.mm.default]
    assert {node.meta["val"].dtype for node in products} == {BF16}
    assert {node.meta["val"].dtype for node in program.returned} == {FP32}
    logarithms = [n for n in program.graph.nodes if n.target is torch.ops.aten.log.default]
    assert {node.meta["val"].dtype for node in logarithms} == {FP32}


def test_casts_are_named_by_their_parameter_and_stand_beside_their_use(program: Program) -> None:
    order = list(program.graph.nodes)
    weight = next(n for n in program.placeholders if n.meta["operator"] == "layers.0.up.weight")
    cast = next(iter(weight.users))
    assert cast.meta["operator"].startswith("layers.0.up/_to_copy#")
    assert order.index(cast) + 1 == min(order.index(user) for user in cast.users)
    gradient = next(
        node
        for node, output in zip(program.returned, program.outputs, strict=True)
        if (output.role, output.name) == ("gradient", "layers.0.up.weight")
    )
    assert order.index(gradient.all_input_nodes[0]) + 1 == order.index(gradient)


def test_the_graph_equals_the_plain_model_under_the_same_casts(program: Program) -> None:
    model, inputs = gpt(), tokens()
    tensors = dict(model.named_parameters())
    values = [
        tensors[v.name].detach() if v.role == "parameter" else torch.ones(()) if v.role == "tangent" else None
        for v in program.inputs
    ]
    given = iter(inputs)
    results = program.graph_module(*(next(given) if value is None else value for value in values))
    with computing_in(model, BF16, canonical_names(model)):
        loss = model(*inputs)
    loss.backward()
    for result, output in zip(results, program.outputs, strict=True):
        expected = loss.detach() if output.role == "loss" else tensors[output.name].grad
        assert expected is not None
        assert result.dtype == FP32
        assert float((result - expected).norm()) <= 2e-2 * max(float(expected.norm()), 1e-3), output.name


def test_batch_norms_stay_wide_and_wide_buffers_do_not_spread() -> None:
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    found = capture(Mixed(), (x, y), precision="bf16")
    casts = {
        entry.name: {user.meta["val"].dtype for user in node.users if is_cast(user)}
        for node, entry in zip(found.placeholders, found.inputs, strict=True)
        if entry.role == "parameter"
    }
    assert casts["first.weight"] == casts["second.bias"] == {BF16}
    assert casts["norm.weight"] == set()
    dtypes = {o.name: n.meta["val"].dtype for o, n in zip(found.outputs, found.returned, strict=True)}
    assert dtypes["norm.running_mean"] == dtypes["loss"] == dtypes["first.weight"] == FP32
    assert dtypes["out"] == BF16
    assert not any(o.name == "second.bias" for o in found.outputs)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.LSTM(4, 4)
    before = dict(model.named_parameters())
    with computing_in(model, BF16, canonical_names(model)):
        assert {weight.dtype for weight in model._flat_weights} == {BF16}
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert all(isinstance(weight, nn.Parameter) for weight in model._flat_weights)


def test_precision_is_part_of_the_fingerprint(program: Program) -> None:
    assert fingerprint(program) != fingerprint(capture(gpt(), tokens()))
    assert fingerprint(capture(gpt(), tokens())) == fingerprint(capture(gpt(), tokens(), precision="fp32"))


def test_unknown_precisions_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"fp4.*unknown"):
        capture(gpt(), tokens(), precision="fp4")


def test_sharded_parameters_are_cast_before_they_are_gathered(program: Program) -> None:
    found = collectives(program, planned(program, {"dp_shard": 4}))
    gathers = [dtype for kind, _, dtype, _ in found if kind == "all_gather_into_tensor"]
    assert len(gathers) > 20
    assert set(gathers) == {BF16}


def test_gradients_are_reduced_while_backward_runs(program: Program) -> None:
    nodes = list(lower(program, planned(program, {"dp_shard": 4}), 0).graph.nodes)
    targets = [str(node.target) for node in nodes]
    scatters = [i for i, target in enumerate(targets) if "reduce_scatter" in target]
    products = [i for i, target in enumerate(targets) if target == "aten.mm.default"]
    assert sum(scatter < products[-1] for scatter in scatters) > len(scatters) // 2


@pytest.mark.parametrize("dims", [{"dp_shard": 4}, {"dp_replicate": 4}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
def test_gradients_are_summed_in_fp32(program: Program, dims: dict[str, int]) -> None:
    found = collectives(program, planned(program, dims))
    sums = [dtype for kind, phase, dtype, _ in found if kind in SUMS and phase == "backward"]
    assert len(sums) >= 20
    assert set(sums) == {FP32}


def test_tensor_parallel_activations_are_summed_in_bf16(program: Program) -> None:
    found = collectives(program, planned(program, {"tp": 4}))
    sums = [(dtype, node) for kind, _, dtype, node in found if kind in SUMS]
    assert {dtype for dtype, node in sums if "/mm" in node.meta["operator"]} == {BF16}


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_free_plans_move_no_parameter_and_sum_no_gradient_in_the_wrong_dtype(
    program: Program, shape: tuple[int, ...]
) -> None:
    plan = make_plan(program, Request(cluster=CLUSTER, mesh=shape, with_baselines=False))
    parameters = {entry.name for entry in program.inputs if entry.role == "parameter"}
    for kind, _, dtype, node in collectives(program, plan):
        operator = node.meta["operator"]
        assert operator not in parameters, f"{kind} of a master in {dtype}"
        if kind in SUMS and operator.split("/")[1].startswith("_to_copy") and operator.endswith("/bwd"):
            assert dtype == FP32


def test_predicted_memory_counts_fp32_states_and_bf16_activations(program: Program) -> None:
    narrow = planned(program, {"dp_replicate": 4}).predicted.bytes_by_kind
    wide = planned(capture(gpt(), tokens()), {"dp_replicate": 4}).predicted.bytes_by_kind
    assert narrow["parameters"] == wide["parameters"]
    assert narrow["optimizer state"] == wide["optimizer state"]
