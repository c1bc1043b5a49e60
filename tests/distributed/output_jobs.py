"""Jobs of the workers: outputs, gradients and weights as a loop that was written for one process reads them."""

from __future__ import annotations

import copy
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.runtime.guards import spread_values
from autopar.runtime.parameters import local_block, local_tensor
from autopar.runtime.step import handed_outputs
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.distributed.pipeline_jobs import captured as captured_case
from tests.distributed.pipeline_models import CASES

WORDS, WIDTH = 12, 8


class Speaker(nn.Module):
    """Predicts the next word; the head is the embedding. forward(tokens (8, 6)) -> loss, logits (8, 6, 12), a mean per
    sample (8,), and one per word (12,), which has no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)
        self.config = {"words": WORDS}

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.layer(self.embedding(tokens) * self.scale)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return {"loss": loss, "logits": logits, "samples": logits.mean((1, 2)), "words": self.head.weight.mean(1)}

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """Tokens (B, T) -> (B, T + count), the likeliest words."""
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)["logits"][:, -1:].argmax(-1)], 1)
        return tokens

    def save_pretrained(self, folder: str) -> None:
        """One file."""
        torch.save(self.state_dict(), Path(folder) / "weights.pt")


def speaker() -> Speaker:
    """The same weights everywhere."""
    torch.manual_seed(0)
    return Speaker()


def tokens() -> Tensor:
    """(8, 6), the same everywhere."""
    return torch.randint(0, WORDS, (8, 6), generator=torch.Generator().manual_seed(1))


DIFFERENTIABLE = ("logits",)


def captured(**_: Any) -> bool:
    """Capture what the jobs of this file run."""
    return capture_once("speaker", speaker(), (tokens(),), differentiable=DIFFERENTIABLE)


def compiled(dims: dict[str, int], **options: Any) -> autopar.ParallelModule:
    """Of `speaker`."""
    return compile_once("speaker", speaker(), (tokens(),), dims=dims, differentiable=DIFFERENTIABLE, **options)


def error(found: Any, wanted: Tensor) -> float:
    """The largest difference of a plain tensor; infinite for tensors that are not plain, and of another shape."""
    if type(found) is not Tensor or found.shape != wanted.shape:
        return float("inf")
    return float((found.detach().double() - wanted.detach().double()).abs().max())


def gradient_error(module: autopar.ParallelModule, reference: nn.Module) -> float:
    """The largest difference of a gradient, by its largest element."""
    found = module.full([parameter.grad for parameter in module.parameters()])
    wanted = [parameter.grad for parameter in reference.parameters()]
    return max(error(a, b) / float(b.abs().max()) for a, b in zip(found, wanted, strict=True) if b is not None)


@prepared_by(captured)
def read(dims: dict[str, int], mode: str = "global", outputs: str = "lazy", planted: bool = False) -> dict[str, float]:
    """Errors of what a loop makes of outputs. planted: the mutation, in which no block is moved."""
    module, reference = compiled(dims, batch=mode, outputs=outputs), speaker()
    index, count = module.data_shard() if mode == "local" else (0, 1)
    mine = slice(index * 8 // count, (index + 1) * 8 // count)
    rows = slice(0, 8) if outputs == "gather" else mine
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(handed_outputs, "exchange_block", _own_block_alone)
        out, plain = module(tokens()[mine]), reference(tokens())
        labels, logits = tokens()[rows], plain["logits"][rows]
        right = (logits.argmax(-1) == labels).float().mean()
        errors = {
            "format": abs(float(f"{out['loss']:.6f}") - float(plain["loss"].detach())) - 1e-6,
            "loss": error(out["loss"], plain["loss"]),
            "shape": float(out["logits"].shape != logits.shape or len(out["logits"]) != len(logits)),
            "accuracy": error((out["logits"].argmax(-1) == labels).float().mean(), right),
            "array": error(torch.from_numpy(out["logits"].detach().numpy()), logits),
            "list": error(torch.tensor(out["samples"].tolist()), plain["samples"][rows]),
            "without samples": error(out["words"] * 1, plain["words"]),
            "full": max(error(a, b) for a, b in zip(module.full(out).values(), plain.values(), strict=True)),
        }
    (out["loss"] + out["logits"].sin().sum()).backward()
    (plain["loss"] + plain["logits"].sin().sum()).backward()
    return {**errors, "gradients": gradient_error(module, reference)}


def _own_block_alone(block: Tensor, shape: Any, before: Any, after: Any, groups: Any) -> Tensor:
    whole = block.new_zeros(shape)
    local_block(whole, before, groups.mesh, groups.place).copy_(block)
    return local_block(whole, after, groups.mesh, groups.place)


@prepared_by(captured)
def unread(dims: dict[str, int]) -> int:
    """How many blocks are moved in a step that reads no output."""
    module, moved = compiled(dims), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handed_outputs, "exchange_block", lambda *_: moved.append(1))
        out = module(tokens())
        out["loss"].backward()
        assert not isinstance(out["logits"].shape, str), (len(out["logits"]), out["logits"].dtype, repr(out["logits"]))
    return len(moved)


@prepared_by(captured)
def read_alone(dims: dict[str, int], seconds: float) -> dict[str, Any]:
    """What rank 0 is told that reads alone, and when; and whether all read afterwards."""
    module, said = compiled(dims), {"waited": 0.0, "text": "", "number": ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.runtime.collectives.common_reads.READ_SECONDS", seconds)
        out = module(tokens())
        out["loss"].backward()
        if dist.get_rank() == 0:
            begin = time.monotonic()
            said["text"] = _told(lambda: out["logits"].sum())
            said["waited"] = time.monotonic() - begin
            said["number"] = _told(lambda: module.get_parameter("layer.weight").grad.norm().item())  # type: ignore[union-attr]
        dist.barrier()
        said["other"] = _told(lambda: (out["logits"] if dist.get_rank() == 0 else out["samples"]).sum())
    said["after"] = error(out["logits"] * 1, speaker()(tokens())["logits"])
    return said


def _told(action: Any) -> str:
    try:
        action()
    except autopar.RankMismatchError as raised:
        return str(raised)
    return ""


@prepared_by(captured)
def numbers(dims: dict[str, int], planted: bool = False) -> dict[str, float]:
    """Errors of what a loop makes of gradients and weights. planted: the mutation, with the numbers of this rank."""
    module, reference = compiled(dims), speaker()
    mine, theirs = (
        (each, torch.optim.SGD(each.parameters(), lr=0.5), [copy.deepcopy(p).detach() for p in each.parameters()])
        for each in (module, reference)
    )
    found: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(spread_values, "_whole", lambda tensor, what: local_tensor(tensor))
        for each, optimizer, average in (mine, theirs):
            for _ in range(2):
                optimizer.zero_grad()
                penalty = sum(p.pow(2).sum() for p in each.parameters())
                (each(tokens())["loss"] + 0.1 * penalty).backward()
                optimizer.step()
                for kept, parameter in zip(average, each.parameters(), strict=True):
                    kept.mul_(0.9).add_(parameter.detach(), alpha=0.1)
            gradients = [p.grad for p in each.parameters() if p.grad is not None]
            found.append(
                {
                    "norms": [g.norm().item() for g in gradients],
                    "norm": sum(float(g.norm()) ** 2 for g in gradients) ** 0.5,
                    "text": float(f"{gradients[-1].norm():.5f}"),
                    "largest": [float(g.abs().max()) for g in gradients],
                    "finite": [bool(torch.isfinite(g).all()) for g in gradients],
                    "weights": float(sum(p.detach().sum() for p in each.parameters())),
                    "average": [kept.sum().item() for kept in average],
                    "copied": [float(copy.deepcopy(p).detach().sum()) for p in each.parameters()],
                    "copied gradient": [float(copy.deepcopy(g).sum()) for g in gradients],
                    "listed": torch.tensor(gradients[0].tolist()).sum().item(),
                    "array": float(gradients[0].flatten().numpy().sum()),
                    "loaded": _loaded(each),
                }
            )
    a, b = found
    return {name: float((torch.tensor(a[name]) * 1.0 - torch.tensor(b[name]) * 1.0).abs().max()) for name in a}


def _loaded(module: nn.Module) -> list[float]:
    plain = Speaker()
    with suppress(RuntimeError):  # of the mutation, whose blocks have other shapes
        plain.load_state_dict(module.state_dict())
    return [float(parameter.detach().abs().sum()) for parameter in plain.parameters()]


@prepared_by(captured)
def as_plain(dims: dict[str, int], folder: str) -> dict[str, Any]:
    """What the compiled module answers as the plain one does."""
    module, reference = compiled(dims), speaker()
    for each in (module, reference):
        each(tokens())["loss"].backward()
        torch.optim.SGD(each.parameters(), lr=0.5).step()
    state, wanted = module.full_state_dict(), reference.state_dict()
    kept = module.full_state_dict(only_on_rank_0=True)
    module.save_pretrained(folder)
    saved = torch.load(Path(folder) / "weights.pt")
    plain = module.plain_model()
    with torch.no_grad():
        module.get_parameter("layer.bias").copy_(torch.arange(float(WIDTH)))
    return {
        "config": module.config == reference.config,
        "names": list(state) == list(wanted),
        "state": max(error(state[name], wanted[name]) for name in wanted),
        "tied": state["head.weight"] is state["embedding.weight"] and plain.head.weight is plain.embedding.weight,
        "kept": len(kept) == (len(wanted) if dist.get_rank() == 0 else 0),
        "saved": max(error(saved[name], wanted[name]) for name in wanted),
        "plain": error(plain(tokens())["logits"], reference(tokens())["logits"]),
        "written": error(module.full(module.get_parameter("layer.bias")).detach(), torch.arange(float(WIDTH))),
        "generated": bool(torch.equal(plain.generate(tokens(), 3), reference.generate(tokens(), 3))),
        "generates": tuple(module.generate(tokens(), 3).shape) == (8, 9),
    }


@prepared_by(captured_case)
def of_stages(name: str, plan: bytes) -> dict[str, Any]:
    """What a rank answers that holds some stages only."""
    case = CASES[name]
    module = compile_once(name, case.model(), case.batch(0), plan=Plan.from_json(plan))
    out, wanted = module(**case.batch(0)), case.model()
    state, plain = module.full_state_dict(), module.plain_model()
    kept = module.full_state_dict(only_on_rank_0=True)
    theirs, expected = wanted(**case.batch(0)), wanted.state_dict()
    return {
        "names": list(state) == list(expected),
        "kept": list(kept) == (list(expected) if dist.get_rank() == 0 else []),
        "own": len(module.state_dict()) < len(expected),
        "state": max(error(state[key], value) for key, value in expected.items()),
        "plain": error(plain(**case.batch(0))["loss"], theirs["loss"]),
        "logits": error(out["logits"] * 1, theirs["logits"]),
        "full": error(module.full(out["logits"]), theirs["logits"]),
    }
