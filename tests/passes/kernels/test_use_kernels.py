"""Programs with our operators compute what they computed without, on one rank and on several, forward and backward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch.nn import functional

import autopar
from autopar.capture import capture
from autopar.ops import linear_cross_entropy
from autopar.passes.kernels.graph_patterns import name_of
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import FOR_MEMORY, KERNELS
from autopar.program import Program
from benchmarks.models import LossOnly
from tests.passes.hand_plans import Results, run_plan, tensors_of, worst
from tests.passes.lowered_programs import lower

WIDTH, VOCABULARY, BATCH, LENGTH = 16, 4096, 8, 64
WHOLE = tuple(kind for kind in KERNELS if kind not in FOR_MEMORY)
"""All kinds but those that compute twice."""
OURS = ("rms", "norm", "gated", "gelu", "cross_entropy", "pack")


class RootMeanSquare(nn.Module):
    """As Llama writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, 32), (WIDTH, 32), (32, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class ByHand(nn.Module):
    """An MLP with GELU written out, as GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        bent = torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))
        return self.down(0.5 * x * (1.0 + bent))


class Small(nn.Module):
    """A residual stack with a loss over a vocabulary, in which some labels are ignored."""

    def __init__(self, style: str) -> None:
        super().__init__()
        norm, mlp = (RootMeanSquare, Gated) if style == "llama" else (lambda: nn.LayerNorm(WIDTH), ByHand)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norms, self.mlps = nn.ModuleList(norm() for _ in range(3)), nn.ModuleList(mlp() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, mlp in zip(self.norms, self.mlps, strict=False):
            x = x + mlp(norm(x))
        logits = self.head(self.norms[2](x)).float()
        return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(1, 0).clone()
    labels[:, :3] = -100
    return {"tokens": tokens, "labels": labels}


def planned(style: str, precision: str | None, ranks: int) -> tuple[Program, Plan, Plan, dict[str, Tensor]]:
    """(program, plan without kernels of ours, plan with all, inputs)."""
    torch.manual_seed(0)
    module, inputs = Small(style), batch()
    program = capture(module, (), inputs, precision=precision)

    def plan(kernels: Sequence[str]) -> Plan:
        found = autopar.plan(
            module, inputs, cluster=f"{ranks}x1 H100-SXM", dims={"tp": ranks}, precision=precision, kernels=kernels,
            with_baselines=False,
        )
        assert isinstance(found, Plan)
        return found.with_(kernel_backend="eager")

    return program, plan(()), plan(WHOLE), tensors_of(program, module, inputs)


def counted(program: Program, plan: Plan) -> Counter[str]:
    names = (name_of(node) for node in lower(program, plan, 0).graph.nodes)
    return Counter(name for name in names if any(part in name for part in OURS))


WANTED = {
    "llama": {"rms_norm": 1, "add_rms_norm": 2, "rms_norm_backward": 3, "gated": 2, "gated_backward": 2},
    "gpt": {
        "layer_norm": 1,
        "add_layer_norm": 2,
        "layer_norm_backward": 3,
        "gelu": 2,
        "gelu_backward": 2,
    },
}
LOSS = {"cross_entropy": 1, "cross_entropy_backward": 1}


@pytest.mark.exhaustive(sample="gpt")
@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_one_rank_computes_the_same_and_saves_less(style: str) -> None:
    exact: Results | None = None
    for precision in (None, "bf16"):
        program, plan, ours, tensors = planned(style, precision, 1)
        assert dict(counted(program, ours)) == WANTED[style] | LOSS
        plain, found = run_plan(program, plan, tensors), run_plan(program, ours, tensors)
        exact = exact or plain
        assert worst(found, exact) < 1e-5 + 2 * worst(plain, exact)  # both round, in other places
        assert found.partitions[0].saved_bytes < plain.partitions[0].saved_bytes


@pytest.mark.exhaustive(sample="gpt")
@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_ranks_that_share_the_vocabulary_compute_the_same(style: str) -> None:
    program, plan, ours, tensors = planned(style, None, 2)
    counts = counted(program, ours)
    assert counts["cross_entropy_rows"] == counts["cross_entropy_backward"] == 1
    plain, found = run_plan(program, plan, tensors), run_plan(program, ours, tensors)
    assert worst(found, plain) < 1e-5
    assert collectives(found) <= collectives(plain)  # backward of the loss needs no sum over the vocabulary


def test_a_wrong_kernel_is_noticed() -> None:
    program, plan, ours, tensors = planned("llama", None, 1)

    def spoil(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if name_of(node) == "cross_entropy_backward":
                node.args = (*node.args[:-1], 1)

    plain = run_plan(program, plan, tensors)
    found = run_plan(program, ours, tensors, change=spoil)
    assert worst(found, plain) > 1e-3


def test_what_somebody_else_reads_is_left_alone() -> None:
    class Shown(Small):
        def forward(self, tokens: Tensor, labels: Tensor) -> Any:
            gate = functional.silu(self.mlps[0].gate(self.embed(tokens)))
            return (gate * self.mlps[0].up(self.embed(tokens))).sum(), gate

    torch.manual_seed(0)
    module, inputs = Shown("llama"), batch()
    program = capture(module, (), inputs)
    plan = autopar.plan(module, inputs, cluster="1x1 H100-SXM", kernels=WHOLE)
    assert counted(program, plan)["gated"] == 0


def test_evaluation_uses_the_forward_kernels() -> None:
    torch.manual_seed(0)
    module, inputs = Small("llama").requires_grad_(False), batch()
    program = capture(module, (), inputs)
    plan = autopar.plan(module, inputs, cluster="1x1 H100-SXM", kernels=WHOLE)
    assert dict(counted(program, plan)) == {
        "rms_norm": 1, "add_rms_norm": 2, "gated": 2, "cross_entropy": 1
    }  # fmt: skip


def collectives(results: Results) -> int:
    """Collectives of rank 0."""
    first = results.partitions[0]
    assert first.backward is not None
    nodes = [*first.forward.graph.nodes, *first.backward.graph.nodes]
    return sum(getattr(node.target, "namespace", "") == "_c10d_functional" for node in nodes)


def rotating() -> nn.Module:
    """Llama as Hugging Face writes it, whose logits nobody sees."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LossOnly(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("dims", [{"dp_replicate": 1}, {"tp": 2}], ids=str)
def test_rotary_embeddings_are_one_kernel_each_way(dims: dict[str, int]) -> None:
    torch.manual_seed(0)
    module, tokens = rotating(), torch.randint(0, 64, (4, 16))
    inputs = {"input_ids": tokens, "labels": tokens}
    program, cluster = capture(module, (), inputs), f"{math.prod(dims.values())}x1 H100-SXM"
    plain, ours = (
        autopar.plan(module, inputs, cluster=cluster, dims=dims, kernels=kernels, mode="fast", with_baselines=False)
        for kernels in ((), ("rope",))
    )
    names = Counter(name_of(node) for node in lower(program, ours, 0).graph.nodes)
    assert names["rope"] == names["rope_backward"] == 2  # of queries and of keys
    tensors = tensors_of(program, module, inputs)
    assert worst(run_plan(program, ours, tensors), run_plan(program, plain, tensors)) < 1e-5


@pytest.mark.parametrize("dims", [{"dp_replicate": 2}, {"tp": 2}], ids=str)
def test_a_product_with_the_vocabulary_joins_its_cross_entropy(
    dims: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_cross_entropy, "LEAST_ROWS", 16)
    monkeypatch.setattr(linear_cross_entropy, "MULTIPLE", 8)  # 64 rows: several chunks
    torch.manual_seed(0)
    module, tokens = rotating(), torch.randint(0, 64, (4, 16))
    inputs = {"input_ids": tokens, "labels": tokens}
    program = capture(module, (), inputs)
    kinds = ("cross_entropy", "linear_cross_entropy")
    plain, ours = (
        autopar.plan(module, inputs, cluster="2x1 H100-SXM", dims=dims, kernels=kernels, mode="fast",
            with_baselines=False)
        for kernels in ((), kinds)
    )
    lowered = lower(program, ours, 0)
    names = Counter(name_of(node) for node in lowered.graph.nodes)
    assert names["linear_cross_entropy"] == names["linear_cross_entropy_backward"] == 1
    assert not any(node.meta.get("local_shape") in ((64, 64), (32, 64), (64, 32)) for node in logits_of(lowered))
    tensors = tensors_of(program, module, inputs)
    found = run_plan(program, ours, tensors)
    assert worst(found, run_plan(program, plain, tensors)) < 1e-5

    def spoil(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if name_of(node) == "linear_cross_entropy_backward":
                node.args = (*node.args[:-1], 1)

    assert worst(run_plan(program, ours, tensors, change=spoil), found) > 1e-3


def logits_of(program: Program) -> list[fx.Node]:
    """Products that read the weight of the head."""
    return [node for node in program.graph.nodes if name_of(node) == "mm" and "lm_head" in str(node.meta["operator"])]


def test_evaluation_makes_no_logits_either() -> None:
    torch.manual_seed(0)
    module, tokens = rotating().requires_grad_(False), torch.randint(0, 64, (4, 16))
    inputs = {"input_ids": tokens, "labels": tokens}
    program = capture(module, (), inputs)
    plan = autopar.plan(module, inputs, cluster="1x1 H100-SXM", kernels=KERNELS)
    assert "linear_cross_entropy" in {name_of(node) for node in lower(program, plan, 0).graph.nodes}
    found = run_plan(program, plan, tensors_of(program, module, inputs))
    assert float(found.outputs["loss"]) == pytest.approx(float(module(**inputs)), rel=1e-5)


def test_logits_that_somebody_reads_stay() -> None:
    torch.manual_seed(0)
    module, inputs = rotating().model, {"input_ids": torch.zeros(4, 16, dtype=torch.long)}
    program = capture(module, (), {**inputs, "labels": inputs["input_ids"]})  # the model returns them
    names = Counter(name_of(node) for node in with_kernels(program, KERNELS).graph.nodes)
    assert (names["cross_entropy"], names["linear_cross_entropy"]) == (1, 0)


def test_a_turn_of_other_pairs_is_no_rotary_embedding() -> None:
    class Swapped(nn.Module):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((second, -first), -1) * sin  # the other way round

    x, angle = torch.randn(2, 3, 8, 4), torch.randn(1, 1, 8, 4)
    program = capture(Swapped(), (x, angle.cos(), angle.sin()), {})
    assert with_kernels(program, KERNELS) is program
