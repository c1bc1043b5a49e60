"""Rows sorted by expert and split into groups by sizes from the data trace as one product per matrix."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture.test_expert_loops import causal, check, num_products

EXPERTS, WIDTH, CHOSEN = 4, 6, 2


class Grouped(nn.Module):
    """Tokens sorted by expert, one product per group, joined and added to their tokens.

    mistake: "dim" splits columns, "size" reads one size as a number, "order" joins the groups from the last on.
    """

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).topk(CHOSEN, dim=-1)
        sizes = chosen.flatten().bincount(minlength=EXPERTS).tolist()
        order = chosen.flatten().argsort()
        token = order.div(CHOSEN, rounding_mode="floor")
        rows = x[token]
        parts = rows.split(sizes, dim=1 if self.mistake == "dim" else 0)
        if self.mistake == "size":
            parts = tuple(rows[: sizes[0]] for _ in parts)
        products = [functional.linear(part, self.weight[e]).tanh() for e, part in enumerate(parts)]
        joined = torch.cat(products[::-1] if self.mistake == "order" else products)
        out = torch.zeros_like(x).index_add(0, token, joined * gates.flatten()[order].unsqueeze(1))
        return out.square().mean()


def test_groups_become_one_product() -> None:
    torch.manual_seed(0)
    program = check(Grouped().double(), {"x": torch.randn(12, WIDTH, dtype=torch.float64)}, tolerance=1e-12)
    assert num_products(program) >= 1


def test_experts_without_rows_take_part() -> None:
    model = Grouped().double()
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([0.0, 100.0, 0.0, 100.0]))
    check(model, {"x": torch.randn(12, WIDTH, dtype=torch.float64)}, tolerance=1e-12)


@pytest.mark.parametrize("mistake", ["dim", "size", "order"])
def test_other_uses_of_the_sizes_are_refused(mistake: str) -> None:
    with pytest.raises(CaptureError, match=r"test_expert_groups.py:\d+"):
        capture(Grouped(mistake), (torch.randn(12, WIDTH),))


def labels_and_ids() -> dict[str, Tensor]:
    ids = torch.randint(0, 96, (2, 8))
    return {"input_ids": ids, "labels": ids.clone()}


def test_jetmoe() -> None:
    config = transformers.JetMoeConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=1,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    check(transformers.JetMoeForCausalLM(config).double(), labels_and_ids(), tolerance=1e-6)


def test_dbrx() -> None:
    config = transformers.DbrxConfig(
        vocab_size=96,
        d_model=32,
        n_heads=4,
        n_layers=1,
        max_seq_len=32,
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.0},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    )
    model = transformers.DbrxForCausalLM(config).double()
    program = check(model, labels_and_ids(), tolerance=1e-6)
    assert num_products(program) >= 3


def test_mixtral_with_its_load_balancing_loss() -> None:
    model = causal(
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    ids = torch.randint(1, 32, (2, 8))
    program = check(model, {"input_ids": ids, "labels": ids.clone()}, tolerance=1e-6)
    assert {"loss", "aux_loss"} <= {output.name for output in program.outputs}
