"""Which steps may run in parts of the batch, what a part costs in memory, and when the planner asks for parts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.planner.batch.batch_flow import NotSeparable
from autopar.planner.batch.micro_batch_program import in_parts, micro_program
from autopar.planner.problem.factorisation import Factorisation
from autopar.program import Input, Joined, MicroProgram, Program, batch_size

CLASSES, LENGTH = 11, 6
Loss = Callable[["Model", Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Embedding, norm and a linear layer under some loss of (model, hidden, output, labels)."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8)
        self.norm = nn.LayerNorm(8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, CLASSES)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.embedding(x))
        output = self.linear(hidden)
        return {"loss": self.loss(self, hidden, output, y), "logits": output}


def _cross_entropy(output: Tensor, y: Tensor, **options: float | Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), **options)  # type: ignore[arg-type]


def _kept(y: Tensor) -> Tensor:
    return (y != -100).float()


def _through_batch_norm(model: Model, hidden: Tensor) -> Tensor:
    return model.batch_norm(hidden.flatten(0, 1)).pow(2).mean()


SEPARABLE: dict[str, tuple[Loss, float]] = {
    "mean": (lambda m, h, o, y: o.pow(2).mean(), 0.5),
    "sum": (lambda m, h, o, y: o.pow(2).sum(), 1.0),
    "sum over a number": (lambda m, h, o, y: o.pow(2).sum() / 100, 1.0),
    "sum over the batch size": (lambda m, h, o, y: o.pow(2).sum() / o.shape[0], 0.5),
    "ignored labels": (lambda m, h, o, y: _cross_entropy(o, y), 0.5),
    "shifted labels": (lambda m, h, o, y: _cross_entropy(o[:, :-1], y[:, 1:]), 0.5),
    "smoothed labels": (lambda m, h, o, y: _cross_entropy(o, y, label_smoothing=0.1), 1.0),
    "weighted classes": (lambda m, h, o, y: _cross_entropy(o, y, weight=torch.arange(1.0, CLASSES + 1)), 0.5),
    "with a penalty": (lambda m, h, o, y: _cross_entropy(o, y) + m.linear.weight.pow(2).sum(), 0.5),
    "two normalisers": (lambda m, h, o, y: _cross_entropy(o, y) + o.pow(2).mean(), 0.5),
    "mean and sum": (lambda m, h, o, y: _cross_entropy(o, y) + o.pow(2).sum(), 1.0),
    "clamped count": (lambda m, h, o, y: (o.pow(2).sum(-1) * _kept(y)).sum() / _kept(y).sum().clamp(min=1), 1.0),
    "weight per token": (lambda m, h, o, y: (o.pow(2).sum(-1) * (_kept(y) / _kept(y).sum())).sum(), 0.5),
    "own row": (lambda m, h, o, y: (o + _kept(y)[torch.arange(len(y))].unsqueeze(-1)).pow(2).mean(), 0.5),
    "own row and a place in it": (
        lambda m, h, o, y: (o + _kept(y)[torch.arange(len(y)), y[:, 0].clamp(0, 5)].view(-1, 1, 1)).pow(2).mean(),
        0.5,
    ),
    "group norm": (lambda m, h, o, y: F.group_norm(h.transpose(1, 2), 1, m.linear.weight.sum(0)).pow(3).mean(), 0.5),
    "dropout": (lambda m, h, o, y: F.dropout(o, 0.3).pow(2).mean(), 0.5),
}
REFUSED: dict[str, tuple[Loss, str]] = {
    "batch norm": (lambda m, h, o, y: _through_batch_norm(m, h), "statistics of the batch"),
    "product of batch means": (
        lambda m, h, o, y: o.mean() + (o.softmax(-1).mean((0, 1)) * o.mean((0, 1))).sum(),
        "multiplies or divides by a value that is contracted over the batch",
    ),
    "division by a batch mean": (
        lambda m, h, o, y: o.mean() + m.linear.weight.sum() / o.mean(),
        "multiplies or divides by a value that is contracted over the batch",
    ),
    "contrast of samples": (lambda m, h, o, y: (h.mean(1) @ h.mean(1).T).logsumexp(1).mean(), "pairs samples"),
    "square of a mean": (lambda m, h, o, y: o.mean() ** 2, "not linear"),
    "extremum": (lambda m, h, o, y: o.max(), "extremum over the batch"),
    "centred by the batch": (lambda m, h, o, y: (o - o.mean(0, keepdim=True)).pow(2).mean(), "mixes samples"),
    "another row": (
        lambda m, h, o, y: (o * _kept(y)[torch.arange(len(y)) - 1].unsqueeze(-1)).mean(),
        "place of a sample",
    ),
    "mean plus sum": (lambda m, h, o, y: o.pow(2).mean() + o.pow(2).sum(), "not linear"),
    "place in the batch": (
        lambda m, h, o, y: (o * torch.arange(o.shape[0]).view(-1, 1, 1)).mean(),
        "place of a sample in the batch",
    ),
}


def _programs(loss: Loss, *sizes: int) -> list[Program]:
    model = Model(loss)
    return [
        capture(model, (), {name: torch.zeros(size, LENGTH, dtype=torch.long) for name in "xy"}, training=True)
        for size in sizes
    ]


def _micro(loss: Loss) -> MicroProgram:
    whole, part = _programs(loss, 8, 4)
    return micro_program(whole, part, 2, Factorisation(whole))


@pytest.mark.exhaustive(every=5)
@pytest.mark.parametrize("name", SEPARABLE)
def test_a_loss_over_samples_is_separable(name: str) -> None:
    loss, scale = SEPARABLE[name]
    micro = _micro(loss)
    assert micro.loss_scale == scale
    assert micro.joined["logits"] == Joined(dim=0)
    returned = [output.name for output in micro.program.outputs if output.role == "statistic"]
    assert returned == list(micro.statistic_scales)
    assert [entry.name for entry in micro.program.inputs if entry.role == "statistic"] == returned


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_samples_is_refused_with_the_reason(name: str) -> None:
    loss, reason = REFUSED[name]
    with pytest.raises(NotSeparable, match=reason):
        _micro(loss)


def test_inputs_without_a_batch_leave_its_size_to_the_others() -> None:
    def size(*batches: int | None) -> int | None:
        shape = (8, LENGTH)
        inputs = [Input(role="input", name="x", shape=shape, dtype=torch.float32, batch_dim=dim) for dim in batches]
        return batch_size(SimpleNamespace(inputs=inputs))  # type: ignore[arg-type]

    assert size(0, None) == 8
    assert size(None, 1) == LENGTH
    assert size(None, None) is None
    assert size(0, 1) is None


def test_a_batch_that_does_not_divide_is_refused() -> None:
    (whole,) = _programs(SEPARABLE["mean"][0], 6)
    with pytest.raises(NotSeparable, match="does not split into 4 equal"):
        in_parts(whole, 4, SimpleNamespace(at_batch=lambda size: whole))


def test_a_switch_between_sizes_is_refused() -> None:
    def loss(model: Model, hidden: Tensor, output: Tensor, y: Tensor) -> Tensor:
        return output.pow(2).mean() if output.shape[0] > 4 else output.abs().mean()

    with pytest.raises(NotSeparable, match="another graph"):
        _micro(loss)


# memory


def _plan(loss: str = "ignored labels", **options: object) -> autopar.Plan:
    losses = {name: loss for name, (loss, _) in (SEPARABLE | REFUSED).items()}  # type: ignore[operator]
    model, batch = Model(losses[loss]), {name: torch.zeros(32, LENGTH, dtype=torch.long) for name in "xy"}
    return autopar.plan(model, batch, cluster="2 H100-SXM", optimizer=torch.optim.SGD, mesh=(2,), **options,
        with_baselines=False)


def test_the_predicted_peak_falls_with_the_number_of_parts() -> None:
    plans = [_plan(micro_batches=parts) for parts in (1, 2, 4, 8)]
    peaks = [plan.predicted.peak_bytes for plan in plans]
    objectives = [plan.objective_seconds for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.7 * peaks[0]
    assert objectives == sorted(objectives)
    assert [plan.micro_batches for plan in plans] == [1, 2, 4, 8]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_limit_that_only_parts_meet_makes_them() -> None:
    limit = 0.9 * _plan(micro_batches=4).predicted.peak_bytes
    with pytest.raises(autopar.InfeasibleError, match="no plan fits"):
        _plan(micro_batches=1, memory_limit=limit)
    chosen = _plan(memory_limit=limit)
    assert chosen.micro_batches > 1
    assert chosen.predicted.peak_bytes <= limit
    assert f"{chosen.micro_batches} micro-batches" in chosen.summary()
    assert autopar.Plan.from_json(chosen.to_json()).micro_batches == chosen.micro_batches


def test_a_roomy_limit_leaves_the_batch_whole() -> None:
    assert _plan(memory_limit=10.0 * _plan(micro_batches=1).predicted.peak_bytes).micro_batches == 1


def test_when_nothing_fits_the_error_says_why_the_batch_stays_whole() -> None:
    with pytest.raises(autopar.InfeasibleError, match=r"the batch stays whole: .* statistics of the batch"):
        _plan("batch norm", memory_limit=2000.0, mode="fast")


def test_parts_that_the_model_cannot_run_are_an_error_with_the_reason() -> None:
    with pytest.raises(autopar.ConfigurationError, match="statistics of the batch"):
        _plan("batch norm", micro_batches=2)
