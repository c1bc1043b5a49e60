"""Lowered plans, executed on simulated ranks, against the plain module: same loss, same gradients."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.capture import capture
from autopar.errors import PlanMismatchError
from autopar.graphs.live_ranges import memory_events
from autopar.layouts.placement import Mesh, Partial, Replicate, Shard, is_legal
from autopar.passes.lowering.check_plan import OperatorPlans
from autopar.passes.lowering.step_halves import split_forward_backward
from autopar.plans.plan_value import ParameterPlan
from tests.passes.hand_plans import calls, hand_plan, operator_entry, picked, run_plan, tensors_of
from tests.passes.lowered_programs import lower

R, P = Replicate(), Partial()
FLAT, SQUARE = Mesh(("tp",), (4,)), Mesh(("dp", "tp"), (2, 2))


class Mlp(nn.Module):
    def __init__(self, width=6, hidden=8):
        super().__init__()
        self.fc = nn.Linear(width, hidden)
        self.proj = nn.Linear(hidden, 4)

    def forward(self, x, y):
        return ((self.proj(nn.functional.gelu(self.fc(x))) - y) ** 2).mean()


class Case:
    """A module, its program, its inputs, and the loss and gradients of the plain step."""

    def __init__(self, module, inputs):
        self.module = module
        self.program = capture(module, (), inputs)
        self.tensors = tensors_of(self.program, module, inputs)
        result = module(**inputs)
        loss = result if isinstance(result, torch.Tensor) else result.loss
        loss.backward()
        self.loss = loss.detach()
        self.gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}

    def errors(self, plan, **options):
        """Largest relative error of the loss and of every gradient."""
        results = run_plan(self.program, plan, self.tensors, **options)
        loss = next(o.name for o in self.program.outputs if o.role == "loss")
        errors = {"loss": float((results.outputs[loss] - self.loss).abs() / self.loss.abs())}
        largest = max(float(g.norm()) for g in self.gradients.values())
        for name, gradient in self.gradients.items():
            scale = max(float(gradient.norm()), 1e-6 * largest)
            errors[name] = float((results.gradients[name] - gradient).norm()) / scale
        return errors, results

    def check(self, plan, **options):
        errors, results = self.errors(plan, **options)
        assert max(errors.values()) < 1e-9, errors
        return results


@pytest.fixture(scope="module")
def mlp():
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 6, dtype=torch.double), "y": torch.randn(8, 4, dtype=torch.double)}
    return Case(Mlp().double(), inputs)


def batch_names(node, rule):
    """The batch is what operators carry in dim 0 (m of a product), or reduce in the gradients of parameters."""
    if node.target is torch.ops.aten.mm.default:
        transposed = node.args[0].target is torch.ops.aten.permute.default and node.meta["phase"] == "backward"
        return "k" if transposed else "m"
    name = "x0" if "expand" in str(node.target) else "d0"
    return name if name in rule.names else None


def data_parallel(case, mesh, parameter):
    axes = len(mesh.shape)
    plan = hand_plan(
        case.program,
        mesh,
        picked(case.program, mesh, lambda node, rule: [batch_names(node, rule)] * axes),
        {i.name: parameter(i) for i in case.program.inputs if i.role == "parameter"},
        {i.name: (Shard(0),) * axes for i in case.program.inputs if i.role == "input"},
    )
    return plan


def all_replicated(meaning):
    return ParameterPlan(stored=(R,), used=(R,), gradient=(R,))


def zero3(meaning):
    return ParameterPlan(stored=(Shard(0),), used=(R,), gradient=(Shard(0),))


def collectives(module):
    return Counter(str(n.target).split(".")[1] for n in module.graph.nodes if "group_axes" in n.meta)


def test_replicated_plan_has_no_collective(mlp):
    results = mlp.check(hand_plan(mlp.program, FLAT, {}))
    assert not collectives(results.partitions[0].forward) + collectives(results.partitions[0].backward)


def test_data_parallel_reduces_the_loss_and_every_gradient(mlp):
    results = mlp.check(data_parallel(mlp, FLAT, all_replicated))
    assert collectives(results.partitions[0].forward) == {"all_reduce": 1}
    assert collectives(results.partitions[0].backward) == {"all_reduce": 4}


def test_zero3_gathers_in_both_phases_and_scatters_gradients(mlp):
    results = mlp.check(data_parallel(mlp, FLAT, zero3))
    part = results.partitions[0]
    assert collectives(part.forward)["all_gather_into_tensor"] == 4
    assert collectives(part.backward) == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 4}
    assert not any("pieces_joined" in value.name for value in part.saved)


def test_kept_parameters_are_saved_and_not_gathered_again(mlp):
    plan = data_parallel(mlp, FLAT, lambda i: replace(zero3(i), keep_gathered=True))
    part = mlp.check(plan).partitions[0]
    assert "all_gather_into_tensor" not in collectives(part.backward)
    assert any("pieces_joined" in value.name for value in part.saved)


def test_what_grows_behind_a_kept_copy_is_gathered_again(mlp):
    """Kept gathered over the first axis, still split over the second: readers of backward gather over that again, and
    whole weights are not saved."""

    def half(meaning):
        return ParameterPlan(
            stored=(Shard(0), Shard(0)), used=(R, Shard(0)), gradient=(Shard(0), Shard(0)), keep_gathered=True
        )

    part = mlp.check(data_parallel(mlp, SQUARE, half)).partitions[0]
    assert collectives(part.backward)["all_gather_into_tensor"] == 1
    whole = 4 * 8 * 8  # bytes of the smaller weight
    assert max(value.bytes for value in part.saved if not value.is_input) < whole


def tensor_parallel(case):
    """Column-parallel fc, row-parallel proj: hidden units split."""
    column, row = (Shard(0),), (Shard(1),)
    hidden = {"fc/mm#0": "n", "fc/add#0": "d1", "/gelu#0": "d1", "proj/mm#0": "k", "proj/mm#0/bwd": "n"}
    hidden |= {"proj/mm#1/bwd": "n", "/gelu_backward#0/bwd": "d1", "fc/mm#0/bwd": "m", "fc/sum#0/bwd": "d1"}
    operators = picked(case.program, FLAT, lambda node, rule: [hidden.get(node.meta["operator"])])
    return hand_plan(
        case.program,
        FLAT,
        operators,
        {
            "fc.weight": ParameterPlan(stored=column, used=column, gradient=column),
            "fc.bias": ParameterPlan(stored=column, used=column, gradient=column),
            "proj.weight": ParameterPlan(stored=row, used=row, gradient=row),
        },
    )


def test_column_and_row_parallel_mlp_needs_one_all_reduce(mlp):
    part = mlp.check(tensor_parallel(mlp)).partitions[0]
    assert collectives(part.forward) == {"all_reduce": 1}
    assert not collectives(part.backward)


def random_plan(case, mesh, seed, density=0.8):
    """Any legal names for any operator, any legal layouts for parameters and inputs."""
    generator = random.Random(seed)

    def pick(node, rule):
        return [
            generator.choice(rule.names) if rule.names and generator.random() < density else None for _ in mesh.shape
        ]

    def layout(shape):
        while True:
            found = tuple(generator.choice([R, *(Shard(d) for d in range(len(shape)))]) for _ in mesh.shape)
            if is_legal(shape, found, mesh):
                return found

    def parameter(meaning):
        return ParameterPlan(
            stored=layout(meaning.shape),
            used=layout(meaning.shape),
            gradient=layout(meaning.shape),
            keep_gathered=generator.random() < 0.3,
            shared_forward=layout(meaning.shape) if generator.random() < 0.3 else None,
            shared_backward=layout(meaning.shape) if generator.random() < 0.3 else None,
        )

    operators = picked(case.program, mesh, pick)
    for name, entry in list(operators.items()):
        node = next(n for n in calls(case.program) if n.meta["operator"] == name)
        if isinstance(node.meta["val"], torch.Tensor) and generator.random() < 0.3:
            shape = tuple(node.meta["val"].shape)
            operators[name] = replace(entry, shared_forward=(layout(shape),), shared_backward=(layout(shape),))
    return hand_plan(
        case.program,
        mesh,
        operators,
        {i.name: parameter(i) for i in case.program.inputs if i.role == "parameter"},
        {i.name: layout(i.shape) for i in case.program.inputs if i.role == "input"},
    )


@pytest.mark.parametrize("mesh", [FLAT, SQUARE, Mesh(("dp", "tp"), (2, 3))], ids=str)
def test_random_plans_of_the_mlp(mlp, mesh):
    for seed in range(6):
        plan = random_plan(mlp, mesh, seed)
        names = random.Random(seed).sample(sorted(plan.operators), k=len(plan.operators) // 2)
        mlp.check(plan, recompute=names if seed % 2 else ())


def test_recomputed_operators_are_not_saved(mlp):
    plan = hand_plan(mlp.program, FLAT, {})
    without = split_forward_backward(lower(mlp.program, plan, 0))
    with_ = split_forward_backward(lower(mlp.program, plan, 0), ["/gelu#0", "fc/add#0", "fc/mm#0"])
    assert with_.saved_bytes < without.saved_bytes
    mlp.check(plan, recompute=["/gelu#0", "fc/add#0", "fc/mm#0"])


def test_what_is_given_up_is_made_once_more_for_who_wants_it_next(mlp):
    plan, again = data_parallel(mlp, FLAT, zero3), ["/gelu#0", "fc/add#0", "fc/mm#0"]
    backward = [node.meta["operator"] for node in calls(mlp.program) if node.meta["phase"] == "backward"]
    made = {0: 0, 1: 0}
    for moment in backward:
        entries = {name: replace(plan.operators[name], recompute=True, recompute_at=(moment,)) for name in again}
        part = mlp.check(replace(plan, operators={**plan.operators, **entries}), recompute=again).partitions[0]
        names = [str(node.meta.get("operator")) for node in part.backward.graph.nodes]
        made[names.count("fc/mm#0") - 1] += 1
    assert made[0]  # given up before it is wanted, or when nobody wants it any more
    assert made[1]


def test_recomputation_of_a_sharded_model_uses_the_gathers_of_backward(mlp):
    plan = data_parallel(mlp, FLAT, zero3)
    everything = [node.meta["operator"] for node in calls(mlp.program) if node.meta["phase"] == "forward"]
    part = mlp.check(plan, recompute=everything).partitions[0]
    assert all(value.is_input for value in part.saved)


def test_memory_events_cover_saved_values_up_to_their_use_in_backward(mlp):
    part = split_forward_backward(lower(mlp.program, hand_plan(mlp.program, FLAT, {}), 0))
    events = {event.name: event for event in memory_events(part)}
    forward_nodes = len([n for n in part.forward.graph.nodes if n.op != "output"])
    for value in part.saved:
        if not value.is_input:
            assert events[value.name].bytes == value.bytes
            assert events[value.name].first_index < forward_nodes < events[value.name].last_index
    assert "primals_1" not in events


# mutations that the comparison must notice


def drop(kind):
    def change(module):
        for node in module.graph.nodes:
            if kind in str(node.target):
                node.replace_all_uses_with(node.args[0])
                return

    return change


def test_a_dropped_all_reduce_is_noticed(mlp):
    with pytest.raises(AssertionError):
        mlp.check(data_parallel(mlp, FLAT, all_replicated), change=drop("c10d_functional.all_reduce"))


def test_a_sum_that_becomes_a_max_is_noticed(mlp):
    def change(module):
        for node in module.graph.nodes:
            if "c10d_functional.all_reduce" in str(node.target):
                node.args = (node.args[0], "max", node.args[2])

    with pytest.raises(AssertionError):
        mlp.check(tensor_parallel(mlp), change=change)


# errors


def edited(case, name, **changes):
    plan = tensor_parallel(case)
    return plan.with_(operators={**plan.operators, name: replace(plan.operators[name], **changes)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": ((R,),)}, "gives 1 inputs, the operator has 2"),
        ({"inputs": ((Shard(5),), (R,))}, r"input 0 of shape \[8, 6\] cannot lie as \['S\(5\)'\]"),
        ({"outputs": ((R,),)}, r"output 0 must be split along 'n'"),
        ({"inputs": ((Shard(0),), (Shard(1),))}, "input 0 must be R, not S"),
        ({"axes": (None,)}, "every layout must be R"),
        ({"axes": ("z",)}, "only the names"),
        ({"axes": ("partial",), "inputs": ((P,), (R,)), "outputs": ((P,),)}, "linear"),
    ],
    ids=str,
)
def test_an_entry_that_the_rule_does_not_allow_is_named(mlp, changes, message):
    with pytest.raises(PlanMismatchError, match=message) as caught:
        lower(mlp.program, edited(mlp, "fc/mm#0", **changes), 0)
    assert "fc/mm#0" in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"axes": (None,)}, {"inputs": ((R,), (R,))}, {"implementation": "unknown"}], ids=str
)
def test_of_equal_calls_each_has_an_entry_that_must_fit(mlp, changes):
    (first,) = (node for node in mlp.program.graph.nodes if node.meta.get("operator") == "fc/mm#0")
    plan = edited(mlp, "fc/mm#0")
    wrong = replace(plan.operators["fc/mm#0"], **changes)
    second = fx.Graph().node_copy(first, lambda node: node)
    second.meta["operator"] = "again/mm#0"
    checked = OperatorPlans(plan.with_(operators={**plan.operators, "again/mm#0": wrong}))
    assert checked.of(first) == checked.of(first) == plan.operators["fc/mm#0"]
    with pytest.raises(PlanMismatchError, match="again/mm#0"):
        checked.of(second)


def test_a_missing_operator_and_a_missing_parameter_are_named(mlp):
    plan = tensor_parallel(mlp)
    operators = {name: entry for name, entry in plan.operators.items() if name != "/gelu#0"}
    with pytest.raises(PlanMismatchError, match="no entry for /gelu#0"):
        lower(mlp.program, plan.with_(operators=operators), 0)
    parameters = {name: entry for name, entry in plan.parameters.items() if name != "fc.bias"}
    with pytest.raises(PlanMismatchError, match=r"parameter fc\.bias"):
        lower(mlp.program, plan.with_(parameters=parameters), 0)


def test_nothing_can_be_made_a_partial(mlp):
    entry = operator_entry(next(n for n in calls(mlp.program) if n.meta["operator"] == "/sub#0"), (None,), FLAT)
    plan = hand_plan(
        mlp.program, FLAT, {"/sub#0": replace(entry, axes=("partial",), inputs=((P,), (P,)), outputs=((P,),))}
    )
    with pytest.raises(PlanMismatchError, match="nothing turns into a Partial"):
        lower(mlp.program, plan, 0)


# transformers


def gpt2(dropout=0.0):
    sizes = GPT2Config(n_layer=1, n_embd=16, n_head=4, vocab_size=30, n_positions=16)
    sizes.attn_pdrop = sizes.resid_pdrop = sizes.embd_pdrop = dropout
    return GPT2LMHeadModel(sizes).double().train()


def llama():
    sizes = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=30,
    )
    return LlamaForCausalLM(sizes).double().train()


@pytest.mark.exhaustive(sample="gpt2")
@pytest.mark.slow
@pytest.mark.parametrize("model", [gpt2, llama])
def test_random_plans_of_transformers(model):
    torch.manual_seed(0)
    ids = torch.randint(0, 30, (4, 8))
    case = Case(model(), {"input_ids": ids, "labels": ids})
    forward = [node.meta["operator"] for node in calls(case.program) if node.meta["phase"] == "forward"]
    for mesh, seed in ((FLAT, 1), (SQUARE, 2), (Mesh(("dp", "tp"), (2, 3)), 3)):
        recompute = random.Random(seed).sample(forward, k=len(forward) // 2)
        errors, _ = case.errors(random_plan(case, mesh, seed), recompute=recompute)
        assert max(errors.values()) < 1e-6, errors  # both models compute their loss in float32


def test_dropout_draws_the_same_numbers_however_it_is_split():
    torch.manual_seed(0)
    ids = torch.randint(0, 30, (4, 8))
    case = Case(gpt2(dropout=0.2), {"input_ids": ids, "labels": ids})
    assert lower(case.program, hand_plan(case.program, FLAT, {}), 0).inputs[-1].role == "seed"
    alone = run_plan(case.program, hand_plan(case.program, FLAT, {}), case.tensors)
    for mesh, seed in ((FLAT, 1), (SQUARE, 2)):
        split = run_plan(case.program, random_plan(case, mesh, seed), case.tensors)
        assert torch.allclose(split.outputs["loss"], alone.outputs["loss"], rtol=1e-6)
        for name, gradient in alone.gradients.items():
            assert torch.allclose(split.gradients[name], gradient, rtol=1e-5, atol=1e-7), name


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x)).relu().pow(2).mean()


def test_running_statistics_return_to_the_layout_of_their_buffer():
    torch.manual_seed(0)
    module = Normalised().double()
    inputs = {"x": torch.randn(8, 3, 4, 4, dtype=torch.double)}
    program_input = {name: buffer.clone() for name, buffer in module.named_buffers()}
    case = Case(module, inputs)
    case.tensors.update(program_input)
    for mesh, seed in ((FLAT, 1), (SQUARE, 2), (SQUARE, 3)):
        results = case.check(random_plan(case, mesh, seed))
        for name in ("norm.running_mean", "norm.running_var"):
            assert torch.allclose(results.outputs[name], module.get_buffer(name)), name


def test_a_shared_copy_that_cannot_lie_so_is_named(mlp):
    with pytest.raises(PlanMismatchError, match=r"fc/mm#0: a shared copy of shape \[8, 8\] cannot lie as \['S\(2\)'\]"):
        lower(mlp.program, edited(mlp, "fc/mm#0", shared_backward=((Shard(2),),)), 0)


def test_a_layout_that_no_view_carries_is_redistributed_behind_the_view():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, dtype=torch.double))

        def forward(self, x):
            return ((self.weight.exp().view(3, 4) @ x) ** 2).sum()

    torch.manual_seed(0)
    case = Case(Flat(), {"x": torch.randn(4, 5, dtype=torch.double)})
    split = picked(case.program, FLAT, lambda node, rule: ["d0" if node.target is torch.ops.aten.exp.default else None])
    assert any(entry.outputs == ((Shard(0),),) for entry in split.values())  # 12 over 4 is no layout of (3, 4)
    case.check(hand_plan(case.program, FLAT, split))


class GroupNormalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x, y):
        return ((self.norm(self.conv(x)) - y) ** 2).mean()


@pytest.mark.parametrize("name", ["b", "d0"])
def test_helpers_of_local_forms_belong_to_the_phase_of_their_operator(name):
    """Group norm of split positions writes several nodes in front of its own; all of backward's stay in backward."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 2, 8, dtype=torch.double), "y": torch.randn(4, 4, 8, dtype=torch.double)}
    case = Case(GroupNormalised().double(), inputs)
    entries = picked(case.program, FLAT, lambda node, rule: [name if "group_norm" in str(node.target) else None])
    assert sum("group_norm" in n for n in entries) == 2
    case.check(hand_plan(case.program, FLAT, entries))
    lowered = lower(case.program, hand_plan(case.program, FLAT, entries), 0)
    assert all("phase" in node.meta for node in lowered.graph.nodes if node.op == "call_function")
