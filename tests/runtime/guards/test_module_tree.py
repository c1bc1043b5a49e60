"""A compiled module whose tensors or submodules were exchanged trains on, is captured again, or says what to write."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ConfigurationError
from autopar.runtime.guards.module_tree import ModuleTree
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.process_groups import ProcessGroups

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """forward(x (B, 8)) -> scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.act: nn.Module = nn.ReLU()
        self.head = nn.Linear(8, 8)
        self.register_buffer("shift", torch.zeros(8))
        self.shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.head(self.act(self.body(x))) + self.shift, 0.5, self.training).pow(2).mean()

    def twice(self) -> int:
        """A method."""
        return 2


def evaluated() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model().eval()
    reference = copy.deepcopy(model)
    return autopar.compile(model, X, mode="fast"), reference


@pytest.fixture(scope="module")
def compiled() -> ParallelModule:
    module: ParallelModule = evaluated()[0]
    return module


def _half(module: Any) -> None:
    module.body.half()
    module(X)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "half": (lambda m: m.half(), r"parameter \S+ of a compiled module stays torch.float32 .* become torch.float16"),
    "to dtype": (lambda m: m.to(torch.bfloat16), 'compile\\(..., precision="bf16"\\)'),
    "to device": (lambda m: m.to("meta"), "become torch.float32 on meta"),
    "pickle": (pickle.dumps, "neither pickled nor copied.*autopar.save"),
    "torch.save": (lambda m: torch.save(m, io.BytesIO()), "neither pickled nor copied"),
    "deepcopy": (copy.deepcopy, "copy the model before autopar.compile"),
    "own name": (lambda m: setattr(m, "plan", nn.Linear(2, 2)), r"write module.original.plan = "),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what: str, compiled: ParallelModule) -> None:
    call, words = REFUSED[what]
    with pytest.raises(ConfigurationError, match=words):
        call(compiled)
    assert float(compiled(X)) > 0, "the module is as it was"


def test_conversions_to_what_it_is_change_nothing(compiled: ParallelModule) -> None:
    weight = compiled.get_parameter("body.weight")
    assert compiled.float().to("cpu").to(torch.float32) is compiled
    assert compiled.get_parameter("body.weight") is weight


def _replace(name: str, value: Any) -> Callable[[nn.Module], None]:
    def replace(model: nn.Module) -> None:
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, value)

    return replace


EXCHANGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "submodule": (_replace("head", nn.Linear(8, 8)), r"parameter head.weight is \S+ .8, 8. on cpu .not sharded"),
    "parameter": (_replace("head.weight", nn.Parameter(torch.ones(8, 8))), "parameter head.weight .*load_state"),
    "shape of a buffer": (_replace("shift", torch.zeros(1)), r"buffer shift is torch.float32 \(1,\)"),
    "dtype of a submodule": (lambda m: m.body.half(), "parameter body.weight is torch.float16"),
    "added": (_replace("extra", nn.Linear(2, 2)), "parameter extra.weight was added after autopar.compile"),
    "removed": (lambda m: delattr(m, "head"), "parameter head.weight was removed after autopar.compile"),
}


@pytest.mark.parametrize("what", [what for what in EXCHANGED if what not in ("submodule", "parameter")])
def test_exchanged_tensors_are_named(what: str) -> None:
    exchange, words = EXCHANGED[what]
    model = Model()
    for parameter in ("body", "head"):
        model.get_submodule(parameter).requires_grad_(True)
    tree = ModuleTree(model)
    assert not tree.changed()
    exchange(model)
    with pytest.raises(ConfigurationError, match=words):
        tree.changed()


@pytest.mark.parametrize("what", ["submodule", "parameter"])
def test_plain_parameters_may_take_the_place_of_plain_ones(what: str) -> None:
    model = Model()
    tree = ModuleTree(model)
    EXCHANGED[what][0](model)
    assert tree.changed()


def test_a_new_head_of_the_same_form_computes_on_one_process() -> None:
    module, model = evaluated()
    module.head = head = nn.Linear(8, 8)
    model.head = head
    assert float(module(X)) == pytest.approx(float(model(X)))


def test_submodules_without_weights_values_and_buffers_may_be_exchanged() -> None:
    module, model = evaluated()
    assert float(module(X)) == pytest.approx(float(model(X)))
    for each in (module, model):
        each.act = nn.GELU()
    assert float(module(X)) == pytest.approx(float(model(X)))
    for each in (module, model):
        each.shift = torch.ones(8)
        with torch.no_grad():
            each.get_parameter("body.weight").mul_(2)
    assert float(module(X)) == pytest.approx(float(model(X)))
    assert len(module._steps) == 2


def test_without_the_tree_an_exchanged_submodule_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, model = evaluated()
    monkeypatch.setattr(ModuleTree, "changed", lambda self: False)
    for each in (module, model):
        each.act = nn.GELU()
    assert abs(float(module(X)) - float(model(X))) > 1e-4


def test_modes_are_those_of_the_original_whoever_sets_them() -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model).eval()
    module = autopar.compile(model, mode="fast")
    module.eval()
    assert float(module(X)) == pytest.approx(float(reference(X))), "eval mode before the module is planned"
    module.train()
    loss = module(X)
    loss.backward()
    assert module.get_parameter("body.weight").grad is not None
    model.eval()
    assert not module.training
    assert float(module(X)) == pytest.approx(float(reference(X)))


def test_attributes_of_the_original_are_read_and_methods_refused(compiled: ParallelModule) -> None:
    compiled.note = "kept"
    assert compiled.original.note == compiled.note == "kept"
    with pytest.raises(AttributeError, match=r"twice\(\) is a method of the original model"):
        compiled.twice()
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'nothing'"):
        compiled.nothing  # noqa: B018


def test_torch_compile_runs_the_module_as_it_is() -> None:
    module, model = evaluated()
    assert float(torch.compile(module)(X)) == pytest.approx(float(model(X)))


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_anomaly_detection_runs_on_one_process_and_elsewhere_without_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = evaluated()
    module.train()
    with torch.autograd.detect_anomaly():
        module(X).backward()
    module.zero_grad()
    monkeypatch.setattr(ProcessGroups, "is_alone", False)
    with torch.autograd.detect_anomaly(check_nan=False):
        module(X).backward()
    with pytest.raises(ConfigurationError, match="check_nan=False"), torch.autograd.detect_anomaly():
        module(X).backward()
