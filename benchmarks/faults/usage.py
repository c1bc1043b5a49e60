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
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import autopar
from benchmarks.faults.fault import Fault, Scene, Wrong, fault, make_fault
from benchmarks.faults.victims import (
    Bare,
    Net,
    Normalised,
    backward,
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
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], enable_gqa=self.heads != self.kv_heads)
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


@fault(17, "the model is in eval mode at compile, where it is trained, and then in training mode",
       on=("alone", "dp2", "shard4", "tp2"), right=True)  # fmt: skip
def eval_then_train(scene: Scene) -> None:
    _in_both_modes(Normalised, scene)


@fault(17, "the same in stages", on=("pp2",), right=True, words=(r"model.train\(\) before",))
def eval_then_train_in_stages(scene: Scene) -> None:
    _in_both_modes(Net, scene)


def _in_both_modes(kind: type[Net], scene: Scene) -> None:
    module = compiled(scene, kind().eval(), batch())
    for seed in range(2):
        expect_step(module, kind().eval(), batch(seed))
    module.train()
    expect_step(module, kind(), batch())


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
               right=True, words=(f"{name.split()[0]}|optimizer",))
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
            backward(loss)
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
    expect_value("the loss", loss_of(module(**batch())), loss_of(plain(**batch())), 1e-3)


@fault(17, "the compiled module is moved to fp64", on=("alone", "shard2"), right=True, words=("float64|dtype|double",))
def to_double(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()).to(torch.float64), Net().double()
    inputs = {**batch(), "x": batch()["x"].double()}
    expect_step(module, plain, inputs)


@fault(
    17,
    "the compiled module is moved to bf16 by .bfloat16()",
    on=("alone", "shard2"),
    words=("bfloat16|precision|dtype",),
)
def to_bfloat16(scene: Scene) -> None:
    module = compiled(scene, Net(), batch()).bfloat16()
    backward(loss_of(module(**batch())))


@fault(17, "inputs come in fp64 to a model in fp32", on=("alone", "dp2"), right=True, words=("float64|double|dtype",),
       as_torch=True)  # fmt: skip
def double_inputs(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    backward(loss_of(module(**{**batch(), "x": batch()["x"].double()})))
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
    backward(loss_of(module(**batch())))
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


@fault(
    17, "the compiled module is given to torch.compile", on=("alone", "shard2"), right=True, words=("torch.compile",)
)
def torch_compiled(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    wrapped: Any = torch.compile(module, backend="eager")
    backward(loss_of(wrapped(**batch())))
    expect_step(module, Net(), batch())


@fault(17, "the model was given to torch.compile before", on=("alone", "dp2"), right=True, words=("torch.compile",))
def compiled_by_torch_before(scene: Scene) -> None:
    wrapped: Any = torch.compile(Net(), backend="eager")
    module = compiled(scene, wrapped, batch())
    loss = loss_of(module(**batch()))
    expect_value("the loss", loss, loss_of(Net()(**batch())))


@fault(17, "anomalies are detected by autograd", on=("alone", "shard2"), right=True,
       words=("detect_anomaly", "check_nan=False"))  # fmt: skip
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


@fault(
    17,
    "the compiled module is wrapped by DistributedDataParallel",
    on=("dp2",),
    right=True,
    words=("DistributedDataParallel|DDP",),
)
def wrapped_by_ddp(scene: Scene) -> None:
    module = nn.parallel.DistributedDataParallel(compiled(scene, Net(), batch()))
    backward(loss_of(module(**batch())))
    expect_step(module.module, Net(), batch())


@fault(
    17,
    "the model is wrapped by DistributedDataParallel before",
    on=("dp2",),
    right=True,
    words=("DistributedDataParallel",),
)
def ddp_before(scene: Scene) -> None:
    module = compiled(scene, nn.parallel.DistributedDataParallel(Net()), batch())
    loss = loss_of(module(**batch()))
    expect_value("the loss", loss, loss_of(Net()(**batch())))


@fault(17, "the model is sharded by fully_shard before", on=("shard2",), words=("fully_shard|FSDP|DTensor",))
def fsdp_before(scene: Scene) -> None:
    sharded: Any = fully_shard(Net())
    compiled(scene, sharded, batch())


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
            backward(loss_of(model(**batch(seed))))
            optimizer.step()
    wanted = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        expect_value(name, parameter, wanted[name])


@fault(
    17, "one parameter is in two optimizers' hands: groups with other rates", on=("alone", "shard2", "tp2"), right=True
)
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
