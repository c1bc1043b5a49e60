"""Random models of attention under random valid plans, forward and backward, against the program on one rank.

    seed -> model    1 to 3 blocks: causal or not, grouped heads, masks, windows, biases with a gradient, dropout,
                     rotary positions, cross-attention, odd lengths
         -> plan     every operator under any strategy and operator alternative, rings and zigzag order among them

A model follows from `seed // PLANS_PER_MODEL`, since to capture one takes longer than to run several plans.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.layouts.placement import Mesh, Shard
from autopar.planner.problem.factorisation import Factorisation, sequence_class
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from benchmarks.fuzz.check import Outcome
from benchmarks.fuzz.plans import random_plan
from tests.passes.hand_plans import Results, hand_plan, run_plan, tensors_of, worst

PLANS_PER_MODEL = 8
TOLERANCE = 1e-9
LENGTHS = (8, 9, 12, 13, 16, 16, 24)
MESHES = (
    Mesh(("cp",), (2,)), Mesh(("cp",), (3,)), Mesh(("cp",), (4,)), Mesh(("cp", "tp"), (2, 2)),
    Mesh(("cp", "cp_inner"), (2, 2)), Mesh(("dp_shard", "cp"), (2, 2)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one block does. mask: none, a bool one, one of padding, or a bias that has a gradient, of pairs or of keys;
    window: keys j with |i - j| below it, beside the mask; crosses: it reads the keys of the input of the model."""

    causal: bool
    key_heads: int
    heads: int
    mask: str
    window: int | None
    dropout: float
    rotary: bool
    crosses: bool

    @property
    def is_flag(self) -> bool:
        """Whether the call says that it is causal, and no mask does."""
        return self.causal and self.mask == "none" and self.window is None


class Blocks(nn.Module):
    """forward(x (B, T, width), mask (B, 1, T, T)) -> loss."""

    def __init__(self, blocks: list[Block], length: int, size: int = 4) -> None:
        super().__init__()
        self.blocks, self.size, self.length = blocks, size, length
        width = 4 * size
        self.query, self.key, self.value = (nn.ModuleList() for _ in range(3))
        self.out, self.bias = nn.ModuleList(), nn.ParameterList()
        for block in blocks:
            self.query.append(nn.Linear(width, block.heads * size))
            self.key.append(nn.Linear(width, block.key_heads * size, bias=False))  # a bias has no gradient
            self.value.append(nn.Linear(width, block.key_heads * size))
            self.out.append(nn.Linear(block.heads * size, width))
            rows = length if block.mask == "bias of pairs" else 1
            self.bias.append(nn.Parameter(torch.randn(1, block.heads, rows, length)))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = x
        for at, block in enumerate(self.blocks):
            source = first if block.crosses else x
            query = self.query[at](x).unflatten(-1, (block.heads, self.size)).transpose(1, 2)
            key = self.key[at](source).unflatten(-1, (block.key_heads, self.size)).transpose(1, 2)
            value = self.value[at](source).unflatten(-1, (block.key_heads, self.size)).transpose(1, 2)
            if block.rotary:
                query, key = self._turned(query), self._turned(key)
            mixed = F.scaled_dot_product_attention(
                query, key, value, self._mask(at, mask), block.dropout, block.is_flag,
                enable_gqa=block.heads != block.key_heads,
            )  # fmt: skip
            x = x + torch.tanh(self.out[at](mixed.transpose(1, 2).flatten(-2)))
        return (x**2 * torch.arange(1, 1 + self.length, device=x.device).unsqueeze(-1)).mean()

    def _mask(self, at: int, mask: Tensor) -> Tensor | None:
        kind = self.blocks[at].mask
        seen = self._written_out(self.blocks[at], mask.device)
        if kind == "none":
            return seen
        if kind.startswith("bias"):
            bias: Tensor = self.bias[at]
            return bias
        found = mask[:, :, :1] if kind == "padding" else mask
        return found if seen is None else found & seen

    def _written_out(self, block: Block, device: torch.device) -> Tensor | None:
        """What hides pairs by their indices, where the call does not say it."""
        if block.is_flag or not (block.causal or block.window):
            return None
        place = torch.arange(self.length, device=device)
        ahead = place - place.unsqueeze(-1)
        near = ahead.abs() < (block.window or self.length)
        return near & (ahead <= 0) if block.causal else near

    def _turned(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[-2], dtype=x.dtype).unsqueeze(-1) / 10 ** torch.arange(half, dtype=x.dtype)
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)


def random_blocks(rng: random.Random, length: int) -> Blocks:
    """A model for sequences of this length."""
    blocks = []
    for at in range(rng.choice((1, 1, 2, 3))):
        key_heads, groups = rng.choice(((1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (3, 1)))
        mask = rng.choice(("none", "none", "none", "pairs", "padding", "bias of pairs", "bias of keys"))
        is_bias = mask.startswith("bias")
        blocks.append(
            Block(
                causal=rng.random() < 0.6,
                key_heads=key_heads,
                heads=key_heads * groups,
                mask=mask,
                window=None if is_bias or rng.random() < 0.5 else rng.randint(2, length),
                dropout=rng.choice((0.0, 0.0, 0.3)),
                rotary=rng.random() < 0.4,
                crosses=at > 0 and rng.random() < 0.2,
            )
        )
    return Blocks(blocks, length).double()


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A model, its program and what one rank makes of it."""

    model: Blocks
    program: Program
    factorisation: Factorisation
    tensors: Mapping[str, Tensor]
    alone: Results


@lru_cache(maxsize=1)
def drawn_model(number: int) -> Drawn:
    """The model of that number."""
    torch.manual_seed(number)
    rng = random.Random(f"model {number}")
    length, batch = rng.choice(LENGTHS), rng.choice((1, 2, 3))
    model = random_blocks(rng, length)
    x = torch.randn(batch, length, 16, dtype=torch.float64, requires_grad=rng.random() < 0.5)
    mask = (torch.rand(batch, 1, length, length) < 0.6) | (torch.arange(length) == 0)
    program = capture(model, (x, mask), {})
    tensors = tensors_of(program, model, {"args.0": x.detach(), "args.1": mask})
    alone = run_plan(program, hand_plan(program, Mesh(("cp",), (1,)), {}), tensors)
    return Drawn(model=model, program=program, factorisation=Factorisation(program), tensors=tensors, alone=alone)


def check_attention(seed: int) -> Outcome:
    """The outcome of one plan of one model."""
    drawn = drawn_model(seed // PLANS_PER_MODEL)
    rng = random.Random(f"plan {seed}")
    mesh = rng.choice(MESHES)
    sequence = sequence_class(drawn.program, drawn.factorisation)
    plan = random_plan(drawn.program, mesh, rng, balanced=sequence, factorisation=drawn.factorisation)
    forward = [name for name in plan.operators if not name.endswith("/bwd")]
    recompute = rng.sample(forward, k=rng.choice((0, len(forward) // 2)))
    try:
        error = worst(run_plan(drawn.program, plan, drawn.tensors, recompute=recompute), drawn.alone)
        problem = "" if error < TOLERANCE else f"differs by {error:.3g}"
    except (AutoparError, AssertionError, RuntimeError, LookupError, ValueError, TypeError) as fault:
        problem = f"{type(fault).__name__}: {fault}"
    split = [entry for entry in plan.operators.values() if any(name is not None for name in entry.axes)]
    return Outcome(
        seed=seed,
        targets=tuple(_how(name, plan) for name in plan.operators if "attention" in name.rpartition("/")[2]),
        num_sharded=len(split),
        problem=problem,
        graph=f"{drawn.model.blocks!r}\n{plan.to_json().decode()}" if problem else "",
    )


def _how(name: str, plan: Plan) -> str:
    entry = plan.operators[name]
    zigzag = any(isinstance(p, Shard) and p.zigzag for layout in entry.inputs for p in layout)
    split = math.prod(size for size, axis in zip(plan.mesh.shape, entry.axes, strict=True) if axis == "s")
    return f"{entry.implementation}, s over {split}{', zigzag' if zigzag else ''}"
