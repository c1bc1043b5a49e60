"""`ctc_loss` is captured as one operator with torch's loss and gradients, however targets and lengths are given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.rules.engine import uncovered
from tests.capture.execute import eager_step, outputs_of, run_program, worst_gradient_error
from tests.passes.hand_plans import run_plan, tensors_of

LENGTHS, TARGET_LENGTHS = (9, 7, 9, 8), (3, 1, 4, 2)


class Speech(nn.Module):
    """forward(x (T, N, 5), targets, ...) -> CTC loss over 6 classes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.classes = nn.Linear(5, 6)
        self.options = options

    def forward(
        self, x: Tensor, targets: Tensor, lengths: Any = LENGTHS, target_lengths: Any = TARGET_LENGTHS
    ) -> Tensor:
        log_probs = functional.log_softmax(self.classes(x), -1)
        if lengths is not LENGTHS:
            return functional.ctc_loss(log_probs, targets, lengths, target_lengths, **self.options).sum()
        numbers: Any = (LENGTHS, TARGET_LENGTHS)
        return functional.ctc_loss(log_probs, targets, *numbers, **self.options).sum()


class JoinedLabels(Speech):
    """Labels of all samples joined as Hugging Face's speech models do; negative ones are padding."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        mask = labels >= 0
        log_probs = functional.log_softmax(self.classes(x), -1)
        lengths = torch.full((x.shape[1],), x.shape[0], dtype=torch.long)
        return functional.ctc_loss(log_probs, labels.masked_select(mask), lengths, mask.sum(-1), **self.options)


def _tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(9, 4, 5), torch.randint(1, 6, (4, 4)), torch.tensor(LENGTHS), torch.tensor(TARGET_LENGTHS)


def _labels() -> Tensor:
    *_, targets, _, lengths = _tensors()
    return targets.where(torch.arange(4) < lengths.unsqueeze(1), -100)


def check_like_torch(model: nn.Module, args: tuple[Any, ...]) -> None:
    program = capture(model, args, {})
    assert not uncovered(program)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("autopar.ctc_loss.default") == targets.count("autopar.ctc_loss_backward.default") == 1
    expected_loss, expected, _ = eager_step(model, args, {})
    with torch.no_grad():  # as in a backward pass
        values = run_program(program, model, args, {})
    (loss,) = (outputs_of(program, values, "loss") or outputs_of(program, values, "output")).values()
    torch.testing.assert_close(loss, expected_loss)
    assert worst_gradient_error(outputs_of(program, values, "gradient"), expected) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("joined", [False, True])
def test_the_loss_trains_like_torchs(reduction: str, joined: bool) -> None:
    x, targets, lengths, target_lengths = _tensors()
    given = torch.cat([row[:n] for row, n in zip(targets, TARGET_LENGTHS, strict=True)]) if joined else targets
    check_like_torch(Speech(reduction=reduction), (x, given, lengths, target_lengths))


def test_lengths_may_be_numbers() -> None:
    check_like_torch(Speech(blank=0), _tensors()[:2])


def test_targets_that_are_too_long_may_count_zero() -> None:
    x, targets, _, target_lengths = _tensors()
    lengths = torch.tensor([2, 7, 9, 1])
    check_like_torch(Speech(zero_infinity=True), (x, targets, lengths, target_lengths))


def test_one_sample_without_a_batch_dim() -> None:
    x, targets, lengths, target_lengths = _tensors()
    args = x[:, 0].contiguous(), targets[0, :3], lengths[0].clone(), target_lengths[0].clone()
    check_like_torch(Speech(reduction="none"), args)


def test_labels_joined_by_a_mask_are_captured() -> None:
    check_like_torch(JoinedLabels(blank=0, zero_infinity=True), (_tensors()[0], _labels()))


def test_a_selection_that_something_else_reads_is_refused() -> None:
    class Mean(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_select(x > 0).mean()

    class Sum(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sum(super().forward(x).masked_select(x > 0))

    for model in (Mean(4, 4), Sum(4, 4)):
        with pytest.raises(CaptureError, match="shape depends on values"):
            capture(model, (torch.randn(4, 4),), {})


@pytest.mark.parametrize("devices", [2, 4])
def test_the_batch_of_the_loss_is_split(devices: int) -> None:
    model, (x, targets, lengths, target_lengths) = Speech(), _tensors()
    args = x, targets, lengths, target_lengths
    program = capture(model, args, {})
    dims = {"dp_replicate": devices}
    plan = autopar.plan(model, args, cluster=f"{devices} H100-SXM", dims=dims, batch_dims={"args.0": 1}, strict=True,
        with_baselines=False)
    calls = [n.meta["operator"] for n in program.graph.nodes if "ctc_loss" in str(n.target)]
    assert all(plan.operators[call].axes == ("n",) for call in calls)
    names = [value.name for value in program.inputs if value.role == "input"]
    results = run_plan(program, plan, tensors_of(program, model, dict(zip(names, args, strict=True))))
    loss, gradients, _ = eager_step(model, args, {})
    (found,) = results.outputs.values()
    assert abs(float(found) - float(loss)) < 1e-6 * float(loss)
    assert worst_gradient_error(results.gradients, gradients) < 1e-5


def test_along_the_branches_of_an_example_a_selection_has_its_elements() -> None:
    class Selected(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kept = super().forward(x).masked_select(~torch.eye(4, dtype=torch.bool))
            return torch.cat([kept.reshape(4, 3), x], dim=1).square().sum()

    torch.manual_seed(0)
    model, x = Selected(4, 4), torch.randn(4, 4)
    compiled = autopar.compile(copy.deepcopy(model), (x,), branches="example")
    (expected := model(x)).backward()
    (loss := compiled(x)).backward()
    torch.testing.assert_close(loss, expected)
    gradients = {name: p.grad for name, p in compiled.named_parameters()}
    torch.testing.assert_close(gradients, {name: p.grad for name, p in model.named_parameters()})
