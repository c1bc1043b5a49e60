"""Recorded and replayed graphs train as graphs that run, bit by bit; what a replay cannot do runs, with a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar._compat import storage_references
from autopar.runtime.step import replayed_graphs
from autopar.runtime.step.replayed_graphs import MOST_RECORDINGS, WARM_UPS
from tests.runtime.step.emulated_recorder import EmulatedRecorder

WIDTH, WORDS = 8, 12


class Net(nn.Module):
    """forward(tokens (B, 4), y (B,)) -> loss, logits; a draw, a buffer that changes, another, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.25)
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, tokens: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(tokens).mean(1) * self.scale
        logits = self.head(self.drop(torch.tanh(self.up(self.norm(hidden)))))
        return nn.functional.cross_entropy(logits, y), logits


def batch(number: int, size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return (
        torch.randint(WORDS, (size, 4), generator=generator),
        torch.randint(WORDS, (size,), generator=generator),
    )


class Both:
    """The module with replayed graphs and the one without, of equal weights, each with its optimizer."""

    def __init__(self, **asked: Any) -> None:
        self.recorder = EmulatedRecorder()
        model = Net()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("autopar.api.CudaRecorder", lambda: self.recorder)
            self.modules = [
                autopar.compile(copy.deepcopy(model), batch(0), mode="fast", cuda_graphs=on, **asked)
                for on in (True, False)
            ]
        self.optimizers = [torch.optim.AdamW(module.parameters(), lr=0.05) for module in self.modules]

    def each(self, do: Callable[[autopar.ParallelModule, torch.optim.Optimizer], Any]) -> list[Any]:
        return [do(*pair) for pair in zip(self.modules, self.optimizers, strict=True)]

    def train(self, *numbers: int, size: int = 6) -> None:
        """A step on each batch; results are compared, and weights."""
        for number in numbers:
            self.equal(lambda module, optimizer, number=number: step(module, optimizer, batch(number, size)))
        self.equal_states()

    def equal(self, do: Callable[[autopar.ParallelModule, torch.optim.Optimizer], Any]) -> None:
        torch.testing.assert_close(*self.each(do), rtol=0, atol=0)

    def equal_states(self) -> None:
        self.equal(lambda module, _: dict(module.state_dict()))
        self.equal(lambda module, _: [p.grad for p in module.parameters()])

    @property
    def said(self) -> list[str]:
        return self.modules[0]._maker.replays.said  # type: ignore[attr-defined]


def step(module: autopar.ParallelModule, optimizer: torch.optim.Optimizer, given: tuple[Tensor, Tensor]) -> Any:
    optimizer.zero_grad()
    loss, logits = module(*given)
    loss.backward()
    optimizer.step()
    return loss, logits


@pytest.fixture
def both() -> Both:
    torch.manual_seed(0)
    return Both()


def test_training_is_the_same_bit_by_bit(both: Both) -> None:
    both.train(*range(6))
    assert both.recorder.recorded == 2
    assert both.recorder.warmed == 2 * WARM_UPS
    assert both.recorder.replayed == 2 * (6 - WARM_UPS)
    assert both.said == []


def test_what_was_handed_out_stays_as_it_is(both: Both) -> None:
    both.train(0, 1)

    def kept(module: autopar.ParallelModule, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        loss, logits = module(*batch(2))
        loss.backward()
        gradients = [p.grad for p in module.parameters()]
        buffers = [buffer.clone() for buffer in module.buffers()]
        held = [buffer.detach() for buffer in module.buffers()]
        step(module, optimizer, batch(3))
        step(module, optimizer, batch(4))
        assert any(bool((old != new).any()) for old, new in zip(buffers, module.buffers(), strict=True))
        return loss, logits, gradients, held

    both.equal(kept)
    assert both.recorder.replayed == 6


def test_gradients_that_autograd_hands_out_stay_as_they_are(both: Both) -> None:
    both.train(0, 1, 2)

    def gradients(module: autopar.ParallelModule, optimizer: torch.optim.Optimizer) -> Any:
        found = torch.autograd.grad(module(*batch(3))[0], list(module.parameters()))
        step(module, optimizer, batch(4))
        return found

    both.equal(gradients)
    assert both.recorder.replayed == 6


def test_whoever_holds_a_weight_holds_nothing_up(both: Both) -> None:
    both.train(0, 1, 2)
    held = [parameter.detach() for parameter in both.modules[0].parameters()]
    both.equal(lambda module, _: module(*batch(3)))
    both.train(4)
    assert both.recorder.replayed == 5
    del held


def test_gradients_add_up_over_calls(both: Both) -> None:
    both.train(0, 1)

    def accumulated(module: autopar.ParallelModule, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        losses = []
        for number in (2, 3, 4):
            with module.no_sync():
                losses.append(module(*batch(number))[0])
                losses[-1].backward()
        losses.append(module(*batch(5))[0])
        losses[-1].backward()
        optimizer.step()
        return losses

    both.equal(accumulated)
    both.equal_states()
    assert both.recorder.replayed > 4


def test_two_calls_before_one_backward(both: Both) -> None:
    """The second one would write over what the first one saved: it runs."""
    both.train(0, 1, 2)
    before = both.recorder.replayed

    def twice(module: autopar.ParallelModule, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        first, second = module(*batch(3))[0], module(*batch(4))[0]
        with torch.no_grad():
            module(*batch(5))
        (first * second).backward()
        optimizer.step()
        return first, second

    both.equal(twice)
    assert both.recorder.replayed == before + 2
    both.train(6)
    assert both.recorder.replayed == before + 4


def test_calls_of_two_shapes_before_their_backward(both: Both) -> None:
    """Each has memory of its own."""
    both.train(0, 1, 2)
    both.train(0, 1, 2, size=3)
    before = both.recorder.replayed

    def crossed(module: autopar.ParallelModule, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        second, first = module(*batch(3, 3))[0], module(*batch(3))[0]
        second.backward()
        first.backward()
        optimizer.step()
        return first, second

    both.equal(crossed)
    both.equal_states()
    assert both.recorder.replayed == before + 4


def test_backward_twice_and_a_call_between(both: Both) -> None:
    both.train(0, 1, 2)
    before = both.recorder.replayed

    def again(module: autopar.ParallelModule, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        loss, _ = module(*batch(3))
        loss.backward(retain_graph=True)
        other, _ = module(*batch(4))
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        return loss, other

    both.equal(again)
    both.equal_states()
    assert both.recorder.replayed == before + 3


def test_a_call_without_backward_holds_nothing_up(both: Both) -> None:
    both.train(0, 1, 2)
    before = both.recorder.replayed
    both.equal(lambda module, _: module(*batch(3)))  # results are gone: nobody holds what was saved
    both.train(4)
    assert both.recorder.replayed == before + 3


def test_saved_tensors_that_a_hook_copies(both: Both) -> None:
    both.train(0, 1, 2)

    def packed(module: autopar.ParallelModule, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            loss, _ = module(*batch(3))
        with torch.no_grad():
            module(*batch(4))
        loss.backward()
        return loss

    both.equal(packed)
    both.equal_states()


@pytest.mark.parametrize("assigned", ["data", "state_dict"])
def test_a_parameter_that_lies_elsewhere_is_recorded_again(both: Both, assigned: str) -> None:
    both.train(0, 1, 2)

    def move(module: autopar.ParallelModule, _: Any) -> None:
        if assigned == "data":
            module.get_parameter("up.weight").data = torch.full((WIDTH, WIDTH), 0.1)
        else:
            state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
            state["up.weight"] *= 1.5
            module.load_state_dict(state, assign=True)

    old = both.modules[0].get_parameter("up.weight").detach()
    both.each(move)
    if assigned == "state_dict":
        both.optimizers = [torch.optim.AdamW(module.parameters(), lr=0.05) for module in both.modules]
    both.train(3, 4, 5)
    assert both.recorder.recorded == 4
    assert storage_references(old) == storage_references(torch.zeros(1)), "a graph that no call reaches holds it"


def test_backward_reads_the_weights_that_forward_saw(both: Both) -> None:
    both.train(0, 1, 2)

    def moved(module: autopar.ParallelModule, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        loss, _ = module(*batch(3))
        if module is both.modules[0]:
            module.get_parameter("up.weight").data = torch.full((WIDTH, WIDTH), 0.1)
        loss.backward()
        return [p.grad for p in module.parameters()]

    both.equal(moved)


def test_weights_loaded_in_place_are_read_where_they_lie(both: Both) -> None:
    both.train(0, 1, 2)
    both.each(lambda module, _: module.load_state_dict({n: t * 0.5 for n, t in module.state_dict().items()}))
    both.train(3)
    assert both.recorder.recorded == 2


def test_evaluation_and_other_shapes_have_graphs_of_their_own(both: Both) -> None:
    both.train(0, 1, 2)

    def evaluated(module: autopar.ParallelModule, _: Any) -> Any:
        module.eval()
        with torch.inference_mode():
            found = [module(*batch(number)) for number in range(4)]
        with torch.no_grad():
            found.append(module(*batch(5)))
        module.train()
        return found

    both.equal(evaluated)
    assert both.recorder.recorded == 3
    both.train(*range(3), size=3)
    assert both.recorder.recorded == 5
    both.train(3, 4)
    assert both.recorder.recorded == 5


def test_a_module_records_so_many_graphs_and_runs_the_others(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed_graphs, "MOST_RECORDINGS", 1)
    both.train(*range(4))
    both.train(*range(4), size=3)
    assert both.recorder.recorded == 2
    assert both.said == [
        "cuda_graphs=True: a forward graph runs operator by operator: this module has recorded 1, of other shapes or "
        "other parameters"
    ]
    assert MOST_RECORDINGS > 1


def test_verification_runs_replayed_graphs(both: Both) -> None:
    for _ in range(WARM_UPS + 1):
        autopar.verify(both.modules[0], batch(0))
    assert both.recorder.replayed == 2


def test_what_cannot_be_recorded_runs(both: Both) -> None:
    def refuse(call: Callable[[], Any], pool: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nfurther lines")

    both.recorder.record = refuse  # type: ignore[assignment,method-assign]
    both.train(*range(5))
    assert both.said == [
        "cuda_graphs=True: a forward graph runs operator by operator: RuntimeError: operation not permitted when "
        "stream is capturing"
    ]


def test_all_ranks_run_what_one_cannot_record(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both.modules[0]._maker.replays, "_meet", lambda numbers, what: [[1], numbers])  # type: ignore[attr-defined]
    both.train(*range(4))
    assert both.recorder.replayed == 0
    assert both.said == ["cuda_graphs=True: a forward graph runs operator by operator: another rank cannot record it"]


def test_steps_in_parts_and_other_devices_say_why() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(4, 4)
    on_cpu = autopar.compile(copy.deepcopy(model), x, mode="fast", cuda_graphs=True)
    assert on_cpu._maker.replays.said == [  # type: ignore[attr-defined]
        "cuda_graphs=True records nothing: the module runs on cpu"
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.api.CudaRecorder", EmulatedRecorder)
        in_parts = autopar.compile(
            model, x, loss_fn=lambda y, _: y.square().mean(), mode="fast", micro_batches=2, cuda_graphs=True
        )
    (line,) = in_parts._maker.replays.said  # type: ignore[attr-defined]
    assert "the plan runs the batch in parts" in line


def test_operators_that_the_host_waits_for() -> None:
    graph = torch.fx.symbolic_trace(lambda x, mask: None).graph
    x, mask = graph.find_nodes(op="placeholder")
    x.meta["val"], mask.meta["val"] = torch.zeros(4), torch.zeros(4, dtype=torch.bool)
    aten = torch.ops.aten

    def waits(target: Any, *args: Any) -> bool:
        return replayed_graphs.waits_for_values(graph.call_function(target, args))

    assert waits(aten.nonzero.default, x)
    assert waits(aten._local_scalar_dense.default, x)
    assert waits(aten.index.Tensor, x, [mask])
    assert not waits(aten.index.Tensor, x, [x, None])
    assert not waits(aten.mul.Tensor, x, x)
