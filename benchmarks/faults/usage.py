"""Point 17: ways of use that stand in torch's pages and not in ours, and values at the edge."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from benchmarks.faults.fault import Fault, Scene, Wrong, fault, make_fault
from benchmarks.faults.victims import (
    Bare,
    Batch,
    Net,
    Normalised,
    Scored,
    batch,
    compiled,
    expect_step,
    expect_training,
    expect_value,
    loss_of,
    sgd,
    train,
)


class Heads(nn.Module):
    """Attention with as many heads. forward(x (B, T, heads * 4), labels (B,)) -> loss."""

    def __init__(self, heads: int, *, fused: bool, kv_heads: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.kv_heads, self.fused = heads, kv_heads or heads, fused
        width = heads * 4
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q = nn.Linear(width, width)
            self.k, self.v = (nn.Linear(width, 4 * self.kv_heads) for _ in range(2))
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.fused:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        parts = [t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*parts, enable_gqa=self.heads != self.kv_heads)
        hidden = self.out(mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(hidden.mean(1)), labels)


def _attended(heads: int, fused: bool, kv_heads: int | None, scene: Scene) -> None:
    torch.manual_seed(1)
    inputs = {"x": torch.randn(4, 6, heads * 4), "labels": torch.tensor([0, 1, 2, 3])}
    model, plain = (Heads(heads, fused=fused, kv_heads=kv_heads) for _ in range(2))
    expect_step(compiled(scene, model, inputs), plain, inputs)


ODD_HEADS: tuple[Fault, ...] = tuple(
    make_fault(17, f"{heads} {'fused ' if fused else ''}heads{f' over {kv} keys' if kv else ''}".replace(" ", "_"),
               f"attention with {heads} heads{', q, k and v fused,' if fused else ''} under tensor parallelism",
               partial(_attended, heads, fused, kv), layout=layout, right=True, words=("tp", "head|dim"))
    for heads, fused, kv, layout in (
        (3, False, None, "tp2"), (3, True, None, "tp2"), (5, True, None, "tp4"), (5, False, None, "tp4"),
        (2, True, None, "tp4"), (6, False, 3, "tp2"), (4, False, 1, "tp4"),
    )
)  # fmt: skip


@fault(17, "the model is in eval mode at compile and then trained", on=("alone", "dp2", "shard4"), right=True)
def eval_then_train(scene: Scene) -> None:
    module = compiled(scene, Normalised().eval(), batch())
    expect_step(module, Normalised().eval(), batch())
    module.train()
    expect_step(module, Normalised(), batch())


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
    "AdamW with amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "SGD with foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def _trained_by(make: Callable[[Any], torch.optim.Optimizer], scene: Scene) -> None:
    expect_training(compiled(scene, Net(), batch()), Net(), make, allowed=1e-3)


TRAINED: tuple[Fault, ...] = tuple(
    make_fault(17, name.replace(" ", "_"), f"the optimizer is {name}", partial(_trained_by, make), layout=layout,
               right=True, words=("Adafactor|optimizer",))
    for name, make in OPTIMIZERS.items()
    for layout in (("alone", "shard2", "tp2") if name == "Adafactor" else ("shard2",))
)  # fmt: skip


@fault(17, "the optimizer is LBFGS", on=("alone", "shard2", "dp2", "pp2"), right=True, words=("LBFGS",))
def lbfgs(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), Net()
    for model in (module, plain):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(**batch()))
            loss.backward()
            return loss

        optimizer.step(closure)
    expect_value("the loss", loss_of(module(**batch())), loss_of(plain(**batch())), 1e-3)


@fault(17, "the compiled module is moved to fp64", on=("alone", "shard2"), right=True, words=("float64|dtype|double",))
def to_double(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()).to(torch.float64), Net().double()
    inputs = {**batch(), "x": batch()["x"].double()}
    expect_step(module, plain, inputs)


@fault(17, "the compiled module is moved to bf16 by .bfloat16()", on=("alone", "shard2"), words=("bfloat16|precision|dtype",))
def to_bfloat16(scene: Scene) -> None:
    module = compiled(scene, Net(), batch()).bfloat16()
    loss_of(module(**batch())).backward()


@fault(17, "inputs come in fp64 to a model in fp32", on=("alone", "dp2"), right=True, words=("float64|double|dtype",),
       as_torch=True)  # fmt: skip
def double_inputs(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    loss_of(module(**{**batch(), "x": batch()["x"].double()})).backward()
    raise Wrong("the plain model refuses them")


SAVED: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "torch.save": lambda module: torch.load(_stored(module), weights_only=False),
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "copy.deepcopy": copy.deepcopy,
}


def _stored(module: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


def _copied(way: Callable[[nn.Module], nn.Module], scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    loss_of(module(**batch())).backward()
    other = way(module)
    expect_step(other, Net(), batch())
    train(other, sgd(other.parameters()), [batch()])
    expect_step(module, Net(), batch())


COPIED: tuple[Fault, ...] = tuple(
    make_fault(17, name.replace(".", "_"), f"the compiled module goes through {name}", partial(_copied, way),
               layout=layout, right=True, words=("autopar.save|state_dict|copy|pickle",))
    for name, way in SAVED.items()
    for layout in ("alone", "shard2")
)  # fmt: skip


@fault(17, "the compiled module is given to torch.compile", on=("alone", "shard2"), right=True, words=("torch.compile",))
def torch_compiled(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    wrapped = torch.compile(module, backend="eager")
    loss_of(wrapped(**batch())).backward()
    expect_step(module, Net(), batch())


@fault(17, "the model was given to torch.compile before", on=("alone", "dp2"), right=True, words=("torch.compile",))
def compiled_by_torch_before(scene: Scene) -> None:
    module = compiled(scene, torch.compile(Net(), backend="eager"), batch())
    loss = loss_of(module(**batch()))
    expect_value("the loss", loss, loss_of(Net()(**batch())))


@fault(17, "anomalies are detected by autograd", on=("alone", "shard2"), right=True)
def detect_anomaly(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    with torch.autograd.detect_anomaly(check_nan=True):
        expect_step(module, Net(), batch())


@fault(17, "the compiled module is compiled again", on=("alone", "dp2"), right=True, words=("compiled",))
def compiled_twice(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    expect_step(compiled(scene, module, batch()), Net(), batch())


@fault(17, "two modules are compiled in one job and trained in turn", on=("alone", "dp2", "shard2tp2"), right=True)
def two_modules(scene: Scene) -> None:
    modules = [compiled(scene, Net(layers=layers), batch()) for layers in (2, 3)]
    for _ in range(2):
        for layers, module in zip((2, 3), modules, strict=True):
            expect_step(module, Net(layers=layers), batch())


@fault(17, "the compiled module is wrapped by DistributedDataParallel", on=("dp2",), right=True, words=("DistributedDataParallel|DDP",))
def wrapped_by_ddp(scene: Scene) -> None:
    module = nn.parallel.DistributedDataParallel(compiled(scene, Net(), batch()))
    loss_of(module(**batch())).backward()
    expect_step(module.module, Net(), batch())


@fault(17, "the model is wrapped by DistributedDataParallel before", on=("dp2",), right=True, words=("DistributedDataParallel",))
def ddp_before(scene: Scene) -> None:
    module = compiled(scene, nn.parallel.DistributedDataParallel(Net()), batch())
    loss = loss_of(module(**batch()))
    expect_value("the loss", loss, loss_of(Net()(**batch())))


@fault(17, "the model is sharded by fully_shard before", on=("shard2",), words=("fully_shard|FSDP|DTensor",))
def fsdp_before(scene: Scene) -> None:
    from torch.distributed.fsdp import fully_shard

    compiled(scene, fully_shard(Net()), batch())


def _values(change: Callable[[Batch], object], scene: Scene) -> None:
    module, inputs = compiled(scene, Scored(), batch()), batch()
    change(inputs)
    plain = Scored()
    for model in (module, plain):
        loss_of(model(**inputs)).backward()
    expect_value("the loss", loss_of(module(**inputs)), loss_of(plain(**inputs)))
    wanted = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        expect_value(f"the gradient of {name}", parameter.grad, wanted[name].grad)  # type: ignore[arg-type]


ODD_VALUES: Mapping[str, Callable[[Batch], object]] = {
    "NaN in a sample": lambda inputs: inputs["x"][3].fill_(float("nan")),
    "infinity in a sample": lambda inputs: inputs["x"][3, 2].fill_(float("inf")),
    "huge numbers": lambda inputs: inputs["x"].mul_(1e30),
    "labels that are ignored": lambda inputs: inputs["labels"][:3].fill_(-100),
    "all labels ignored": lambda inputs: inputs["labels"].fill_(-100),
}

VALUES: tuple[Fault, ...] = tuple(
    make_fault(17, name.replace(" ", "_"), f"the batch holds {name}: as the plain model", partial(_values, change),
               layout=layout, right=True)
    for name, change in ODD_VALUES.items()
    for layout in ("alone", "dp2", "tp2", "pp2")
)  # fmt: skip


@fault(17, "a label beyond the classes", on=("alone", "dp2"), words=("label|target|index|class|bounds",), as_torch=True)
def label_beyond(scene: Scene) -> None:
    module, inputs = compiled(scene, Net(), batch()), batch()
    inputs["labels"][2] = 99
    try:
        loss_of(module(**inputs)).backward()
    except IndexError as error:
        raise RuntimeError(str(error)) from error


def _sizes(size: int, scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    expect_step(module, Net(), batch())
    inputs = batch(size=size)
    if size:
        expect_step(module, Net(), inputs)
        return
    expect_value("the loss", loss_of(module(**inputs)), loss_of(Net()(**inputs)))


SIZES: tuple[Fault, ...] = tuple(
    make_fault(17, f"{size} samples".replace(" ", "_"), f"a later batch has {size} samples", partial(_sizes, size),
               layout=layout, right=True, words=("batch|sample|sizes|divide",))
    for size in (0, 1, 3, 7)
    for layout in ("alone", "dp2", "shard4", "tp2", "pp2")
    if layout != "alone" or size == 0
)  # fmt: skip


@fault(17, "the first batch is empty", right=True, words=("batch|empty|sample",))
def empty_first(scene: Scene) -> None:
    compiled(scene, Net(), batch(size=0))


class NoParameters(nn.Module):
    """Nothing to train."""

    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).mean()


ODD_MODELS: Mapping[str, tuple[Callable[[], nn.Module], Any, tuple[str, ...]]] = {
    "no parameters": (NoParameters, {"x": batch()["x"]}, ("parameter|gradient",)),
    "all parameters frozen": (lambda: Bare().requires_grad_(False), {"x": batch()["x"]}, ("parameter|gradient",)),
    "parameters not made yet": (lambda: nn.LazyLinear(4), (batch()["x"],), ("Lazy|lazy",)),
    "parameters on meta": (lambda: Net().to("meta"), batch(), ("meta",)),
    "scripted": (lambda: torch.jit.script(nn.Linear(8, 4)), (batch()["x"],), ("script|Script",)),
    "complex weights": (lambda: nn.Linear(8, 4, dtype=torch.complex64), (batch()["x"].to(torch.complex64),), ("complex",)),
}


def _odd_model(make: Callable[[], nn.Module], inputs: Any, scene: Scene) -> None:
    module = compiled(scene, make(), inputs)
    module(**inputs) if isinstance(inputs, dict) else module(*inputs)


MODELS: tuple[Fault, ...] = tuple(
    make_fault(17, name.replace(" ", "_"), f"a model with {name}", partial(_odd_model, make, inputs), right=True,
               words=words)
    for name, (make, inputs, words) in ODD_MODELS.items()
)  # fmt: skip


class Named(nn.Module):
    """A submodule whose name is a method of ours."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(8, 4))
        self._name = name

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(getattr(self, self._name)(x), labels)


NAMES: tuple[Fault, ...] = tuple(
    make_fault(17, f"submodule named {name}".replace(" ", "_"), f"a submodule is named {name}, as a method of ours",
               partial(lambda name, scene: _odd_model(partial(Named, name), batch(), scene), name), right=True,
               words=(name,))
    for name in ("plan", "mesh", "device", "gather", "calls", "seed", "loss_fn", "precision", "original")
)  # fmt: skip


@fault(17, "default dtype of torch is fp64 while compiling", right=True)
def default_dtype(scene: Scene) -> None:
    torch.set_default_dtype(torch.float64)
    inputs = {**batch(), "x": batch()["x"].double()}
    expect_step(compiled(scene, Net().double(), inputs), Net().double(), inputs)


@fault(17, "compile under inference_mode, then training", right=True, words=("inference",))
def inference_mode(scene: Scene) -> None:
    with torch.inference_mode():
        module = compiled(scene, Net(), batch())
    expect_step(module, Net(), batch())


@fault(17, "compile under no_grad, then training", on=("alone", "dp2"), right=True)
def under_no_grad(scene: Scene) -> None:
    with torch.no_grad():
        module = compiled(scene, Net(), batch())
    expect_step(module, Net(), batch())


@fault(17, "calls under autocast", on=("alone", "dp2"), right=True, words=("autocast",))
def under_autocast(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), Net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expect_value("the loss", loss_of(module(**batch())), loss_of(plain(**batch())), 1e-2)


@fault(17, "deterministic algorithms are asked for", on=("alone", "shard2"), right=True)
def deterministic(scene: Scene) -> None:
    torch.use_deterministic_algorithms(True)
    expect_step(compiled(scene, Net(), batch()), Net(), batch())


@fault(17, "weights are called by torch.func.functional_call", right=True, words=("functional_call|parameters",))
def functional_call(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    others = {name: parameter * 2.0 for name, parameter in module.named_parameters()}
    loss = torch.func.functional_call(module, others, kwargs=batch())
    plain = Net()
    wanted = torch.func.functional_call(plain, {n: p * 2.0 for n, p in plain.named_parameters()}, kwargs=batch())
    expect_value("the loss", loss, wanted)


@fault(17, "gradients are kept across steps by zero_grad(set_to_none=False)", on=("alone", "shard2"), right=True)
def zeroed_gradients(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), Net()
    for model in (module, plain):
        optimizer = sgd(model.parameters())
        for seed in range(3):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model(**batch(seed))).backward()
            optimizer.step()
    wanted = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        expect_value(name, parameter, wanted[name])


@fault(17, "one parameter is in two optimizers' hands: groups with other rates", on=("alone", "shard2", "tp2"), right=True)
def parameter_groups(scene: Scene) -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        return torch.optim.SGD([{"params": given[:2], "lr": 0.01}, {"params": given[2:], "lr": 0.1}])

    expect_training(compiled(scene, Net(), batch()), Net(), groups)


@fault(17, "the loss is no scalar", words=("scalar",))
def loss_with_dims(scene: Scene) -> None:
    autopar.compile(Bare(), {"x": batch()["x"]}, loss_fn=lambda output, inputs: output.pow(2), mode="fast")


@fault(17, "forward branches on values", on=("alone", "dp2"), words=(r"usage.py:\d+", "torch.where"))
def branch_on_values(scene: Scene) -> None:
    class Branch(Net):
        def between(self, hidden: Tensor) -> Tensor:
            return hidden if hidden.sum() > 0 else -hidden

    compiled(scene, Branch(), batch())
