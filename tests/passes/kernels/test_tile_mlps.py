"""MLPs in tiles compute what the model computes, on one rank and on several, and are found in models of the field."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch.nn import functional

import autopar
from autopar.capture import capture
from autopar.ops import linear_cross_entropy, tiled_mlp
from autopar.passes.kernels.graph_patterns import name_of
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from benchmarks.models import LossOnly
from tests.passes.hand_plans import run_plan, tensors_of, worst
from tests.passes.lowered_programs import lower

WORDS, WIDTH, HIDDEN, LAYERS, HEADS = 64, 32, 48, 2, 4
BATCH, LENGTH = 4, 16


def llama(**options: Any) -> nn.Module:
    """SwiGLU."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, use_cache=False, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gemma() -> nn.Module:
    """GeGLU with tanh."""
    config = transformers.GemmaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, head_dim=8, use_cache=False,
    )  # fmt: skip
    return transformers.GemmaForCausalLM(config)


def gpt2() -> nn.Module:
    """Conv1D with biases around a GELU written out."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_inner=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def opt() -> nn.Module:
    """ReLU, with biases."""
    config = transformers.OPTConfig(
        vocab_size=WORDS, hidden_size=WIDTH, ffn_dim=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=LENGTH, word_embed_proj_dim=WIDTH, dropout=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def t5(activation: str) -> nn.Module:
    """gated-gelu as T5 v1.1, relu as the first T5; one layer each way makes two MLPs."""
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=HIDDEN, num_layers=1, num_decoder_layers=1, num_heads=HEADS,
        feed_forward_proj=activation, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


class Beside(nn.Module):
    """Rows of a gated MLP that others read, too: gradients of both products join that of the residual one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.ups, self.downs = (
            nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(LAYERS))
            for sizes in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )
        self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            x = x + down(functional.silu(gate(x)) * up(x)) + x.roll(1, 0)
        return functional.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), labels.flatten()), x


class Vision(nn.Module):
    """An exact GELU, with biases, as BERT and ViT have it."""

    def __init__(self) -> None:
        super().__init__()
        self.ups, self.downs = (
            nn.ModuleList(nn.Linear(*sizes) for _ in range(LAYERS)) for sizes in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )
        self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(functional.gelu(up(x)))
        return functional.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), labels.flatten()), x


MODELS = {
    "Llama": llama,
    "Llama with biases": lambda: llama(mlp_bias=True),
    "Gemma": gemma,
    "GPT-2": gpt2,
    "OPT": opt,
    "T5 v1.1": lambda: t5("gated-gelu"),
    "T5": lambda: t5("relu"),
    "ViT": Vision,
    "beside others": Beside,
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows are four tiles, 32 of a rank two."""
    monkeypatch.setattr(tiled_mlp, "LEAST_ROWS", 16)
    monkeypatch.setattr(linear_cross_entropy, "MULTIPLE", 8)


def captured(name: str, precision: str | None = None) -> tuple[nn.Module, dict[str, Tensor], Program]:
    torch.manual_seed(0)
    module = MODELS[name]()
    module = module if isinstance(module, Vision | Beside) else LossOnly(module)
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH))
    inputs = {"input_ids": tokens, "labels": tokens}
    return module, inputs, capture(module, (), inputs, precision=precision)


def names(program: Program) -> Counter[str]:
    return Counter(name_of(node) for node in program.graph.nodes)


def computed(program: Program, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results and gradients by name."""
    given = [tensors.get(one.name, torch.ones(one.shape, dtype=one.dtype)) for one in program.inputs]
    values = fx.Interpreter(program.graph_module).run(*given)
    return {f"{one.role} {one.name}": value for one, value in zip(program.outputs, values, strict=True)}


def farthest(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    pairs = [(found[name].double(), value.double()) for name, value in exact.items() if value.is_floating_point()]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_every_mlp_of_a_model_is_found_and_computes_the_same(name: str) -> None:
    module, inputs, program = captured(name)
    tensors = tensors_of(program, module, inputs)
    exact = computed(program, tensors)
    for first in ((), ("gated", "gelu")):
        tiled = with_kernels(program, (*first, "tiled_mlp"))
        found = names(tiled)
        assert found["tiled_mlp"] == found["tiled_mlp_backward"] == 2
        assert hidden_tensors(program)
        assert not hidden_tensors(tiled)
        assert farthest(computed(tiled, tensors), exact) < 2e-5


def hidden_tensors(program: Program) -> list[fx.Node]:
    """Values with rows of hidden activations, of which parameters have none."""
    values = [node for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    shapes = [(node, node.meta["val"].shape) for node in values if node.op == "call_function"]
    return [node for node, shape in shapes if HIDDEN in shape and math.prod(shape) == BATCH * LENGTH * HIDDEN]


def test_in_bf16_gradients_are_as_near_as_the_whole_ones() -> None:
    module, inputs, program = captured("Llama", "bf16")
    tensors = tensors_of(program, module, inputs)
    exact = computed(captured("Llama")[2], tensors)
    whole, tiled = (farthest(computed(one, tensors), exact) for one in (program, with_kernels(program, ("tiled_mlp",))))
    assert names(with_kernels(program, ("tiled_mlp",)))["tiled_mlp"] == 2
    assert 0 < tiled < 1.2 * whole < 0.2


def test_evaluation_is_tiled_too() -> None:
    torch.manual_seed(0)
    module, tokens = LossOnly(llama()).requires_grad_(False), torch.randint(0, WORDS, (BATCH, LENGTH))
    inputs = {"input_ids": tokens, "labels": tokens}
    program = capture(module, (), inputs)
    tiled = with_kernels(program, ("tiled_mlp",))
    assert (names(tiled)["tiled_mlp"], names(tiled)["silu"]) == (2, 0)
    tensors = tensors_of(program, module, inputs)
    assert farthest(computed(tiled, tensors), computed(program, tensors)) < 1e-5


class Around(nn.Module):
    """An MLP with something else about it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.down.requires_grad_(how != "frozen")

    def forward(self, x: Tensor) -> Any:
        inner = self.up(x)
        hidden = functional.gelu(inner)
        if self.how == "dropout":
            hidden = functional.dropout(hidden, 0.1, training=True)
        out = self.down(hidden).sum()
        return {"hidden": (out, hidden), "inner": out + inner.sum()}.get(self.how, out)


@pytest.mark.parametrize("how", ["hidden", "inner", "dropout", "frozen"])
def test_what_somebody_else_reads_is_left_alone(how: str) -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    program = capture(Around(how), (x,), {})
    assert names(with_kernels(program, ("tiled_mlp",)))["tiled_mlp"] == 0


def planned(module: nn.Module, inputs: dict[str, Tensor], kernels: tuple[str, ...], **asked: Any) -> Plan:
    found = autopar.plan(module, inputs, cluster="2x1 H100-SXM", kernels=kernels, mode="fast",
                         with_baselines=False, **asked)  # fmt: skip
    assert isinstance(found, Plan)
    return found


def unsummed(grad: Any, x: Any, *rest: Any) -> list[Tensor]:
    """The gradients of the last rows alone in the place of those of the first weight."""
    found: list[Tensor] = tiled_mlp.tiled_mlp_backward(grad, x, *rest)
    last = tiled_mlp.tiled_mlp_backward(grad[-8:].contiguous(), x[-8:].contiguous(), *rest)
    return [found[0], last[1], *found[2:]]


@pytest.mark.exhaustive(sample=["tp': 2}-GPT-2", "dp_shard': 2}-Llama"])
@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
@pytest.mark.parametrize("dims", [{"dp_replicate": 2}, {"tp": 2}, {"dp_shard": 2}], ids=str)
def test_ranks_compute_what_they_compute_whole(name: str, dims: dict[str, int]) -> None:
    module, inputs, program = captured(name)
    plain, ours = (planned(module, inputs, kernels, dims=dims) for kernels in ((), ("tiled_mlp",)))
    lowered = names(lower(program, ours, 0))
    assert lowered["tiled_mlp"] == lowered["tiled_mlp_backward"] == 2
    splits = {axis for key, one in ours.operators.items() if "tiled_mlp#" in key for axis in one.axes}
    assert ("f" in splits) == ("tp" in dims)
    tensors = tensors_of(program, module, inputs)
    found = run_plan(program, ours, tensors)
    assert worst(found, run_plan(program, plain, tensors)) < 1e-5

    def spoil(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if name_of(node) == "tiled_mlp_backward":
                node.target = unsummed

    assert worst(run_plan(program, ours, tensors, change=spoil), found) > 1e-3


def test_a_split_sequence_computes_the_same() -> None:
    module, inputs, program = captured("Llama")
    plain, ours = (planned(module, inputs, kernels, dims={"cp": 2}) for kernels in ((), ("tiled_mlp",)))
    tensors = tensors_of(program, module, inputs)
    assert worst(run_plan(program, ours, tensors), run_plan(program, plain, tensors)) < 1e-5


def test_forward_keeps_its_rows_alone() -> None:
    """Saved for backward: not the two products, nor what the activation makes of them."""
    module, inputs, program = captured("Llama")
    plans = [planned(module, inputs, kernels, dims={"dp_replicate": 2}) for kernels in ((), ("tiled_mlp",))]
    tensors = tensors_of(program, module, inputs)
    whole, tiled = (run_plan(program, plan, tensors).partitions[0].saved_bytes for plan in plans)
    hidden_bytes = 4 * BATCH * LENGTH * HIDDEN // math.prod(plans[0].mesh.shape)
    assert whole - tiled >= LAYERS * 2 * hidden_bytes
