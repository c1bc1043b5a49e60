"""Saved values in forms: who packs and who reads again, which readers get what, and that all else stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import fx, nn

import autopar
from autopar.capture import capture
from autopar.graphs.forward_backward import Partition
from autopar.ops.saved_forms import packed_bytes, rounded_by_index, rounded_bytes
from autopar.passes.lowering.chain import lowered_step, split
from autopar.passes.lowering.checks import check_stage
from autopar.plans.parallel_plan import Plan
from autopar.program import Program, returned_values

ours = torch.ops.autopar
ROWS, WIDTH = 16, 64


class Model(nn.Module):
    """relu#0 is asked for signs alone, relu#1 by a product, too; the norm has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.relu(self.up(x))
        return self.norm(self.down(torch.relu(self.up(x)))).square().mean()


@cache
def planned() -> tuple[Program, Plan]:
    model, x = Model(), torch.randn(ROWS, WIDTH)
    return capture(model, (x,), {}), autopar.plan(model, (x,), cluster="1 cpu", mode="fast")


def lowered(forms: Mapping[str, str], **changes: object) -> Partition:
    """With these forms, checked."""
    program, plan = planned()
    operators = {
        name: replace(one, saved_as=forms[name], **changes) if name in forms else one
        for name, one in plan.operators.items()
    }
    step = lowered_step(program, replace(plan, operators=operators), 0, until=split)
    check_stage(step.only, "split")
    return step.only.partition


def calls(module: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target is target]


def test_what_is_asked_for_its_sign_is_saved_in_bits() -> None:
    partition = lowered({"/relu#0": "mask"})
    (packed,), (again,) = calls(partition.forward, ours.pack_bits.default), calls(
        partition.backward, ours.unpack_bits.default
    )
    assert packed in returned_values(partition.forward.graph)
    assert packed.args[0] not in returned_values(partition.forward.graph)
    assert [user.target for user in again.users] == [torch.ops.aten.threshold_backward.default]
    assert again.next is next(iter(again.users))


def test_a_product_gets_what_was_rounded_and_relu_its_signs() -> None:
    partition = lowered({"/relu#1": "4bit"})
    (rounded,), (again,) = calls(partition.forward, rounded_by_index), calls(
        partition.backward, ours.unround_groups.default
    )
    (bits,) = calls(partition.backward, ours.unpack_bits.default)
    assert {user.target for user in bits.users} == {torch.ops.aten.threshold_backward.default}
    assert torch.ops.aten.threshold_backward.default not in {user.target for user in again.users}
    count = ROWS * WIDTH
    sizes = [saved.bytes for saved in partition.saved if saved.bytes in (rounded_bytes(count, 4), packed_bytes(count))]
    assert sorted(sizes) == [packed_bytes(count), rounded_bytes(count, 4)]
    assert rounded.args[4:] == ((((0, ROWS),), ((0, WIDTH),)), (ROWS, WIDTH))


def test_what_a_form_does_not_fit_stays() -> None:
    plain = lowered({})
    assert [one.bytes for one in lowered({"/relu#1": "mask"}).saved] == [one.bytes for one in plain.saved]
    rounded = lowered({"norm/native_layer_norm#0": "2bit", "down/add#0": "8bit"})
    assert len(rounded.saved) == len(plain.saved)
    assert len(calls(rounded.forward, rounded_by_index)) == 2  # statistics of the norm are not


def test_every_operator_draws_words_of_its_own() -> None:
    partition = lowered({"/relu#1": "8bit", "down/add#0": "8bit"})
    salts = {node.args[3] for node in calls(partition.forward, rounded_by_index)}
    assert len(salts) == 2
    assert min(salts) >= 1 << 31


def test_a_form_may_wait_on_the_host() -> None:
    partition = lowered({"/relu#1": "4bit"}, saved_on="host")
    (rounded,) = calls(partition.forward, rounded_by_index)
    assert next(user.target for user in rounded.users) is ours.copy_to_host.default
    assert sum(one.on_host for one in partition.saved) == 2
