"""Program memory: segments against closed forms, against a storage tracker, and against mutations."""

from __future__ import annotations

import functools
import itertools
import statistics

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.hardware.cluster import Cluster
from autopar.passes.lowering.step_halves import split_forward_backward
from autopar.passes.module_segments import segment_of
from autopar.planner.planning import make_plan
from autopar.program import Program
from autopar.request import Request
from benchmarks.validation.program_memory import LossBytes, SegmentMemory, measure_segments
from tests.passes.lowered_programs import lower
from tests.planner.lifetime_tracker import tracked_peak_bytes

BATCH, SEQ, WIDTH, HEADS, VOCAB = 8, 64, 128, 4, 256
SBH = BATCH * SEQ * WIDTH
MEGATRON_LOSS = LossBytes(saved=4, forward=6, backward=6)


class Block(nn.Module):
    """A layer of GPT, or of Llama where `gated`."""

    def __init__(self, *, gated: bool, dropout: float) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH if gated else 4 * WIDTH, WIDTH)
        self.gated, self.dropout = gated, dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).view(BATCH, SEQ, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(x.shape)), self.dropout)
        wide = self.up(self.norm2(x))
        inner = F.silu(wide[..., : 2 * WIDTH]) * wide[..., 2 * WIDTH :] if self.gated else F.gelu(wide)
        return x + F.dropout(self.down(inner), self.dropout)


class Model(nn.Module):
    """Embedding, blocks, head with loss."""

    def __init__(self, blocks: int, *, gated: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(gated=gated, dropout=dropout) for _ in range(blocks))
        self.head = Head()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x, tokens)
        return loss


class Head(nn.Module):
    """Norm, product with the vocabulary, loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.output(self.norm(x)).float().flatten(0, 1), labels.flatten())


@functools.cache
def lowered(blocks: int, *, gated: bool = False, dropout: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Program:
    """The program of one rank on one device."""
    with torch.device("meta"):
        model = Model(blocks, gated=gated, dropout=dropout).to(dtype)
        program = capture(model, (torch.empty(BATCH, SEQ, dtype=torch.long),), {})
    request = Request(cluster=Cluster.parse("1x1 A100-80"), with_baselines=False, mode="fast")
    return lower(program, make_plan(program, request), 0)


def measured(program: Program, **options: object) -> dict[str, SegmentMemory]:
    return measure_segments(program, segment_of, **options)  # type: ignore[arg-type]


def test_a_block_keeps_34_bytes_per_element_of_its_input() -> None:
    """Korthikanti et al. 2022 without scores, which flash attention does not keep."""
    block = measured(lowered(2, dropout=0.1), fused=True)["layers.1"]
    rows = BATCH * SEQ * (4 * HEADS + 2 * 2 * 2)  # of attention's softmax, and of two norms
    assert block.saved_bytes == 34 * SBH + rows
    assert block.border_bytes == 2 * SBH
    assert block.parameter_elements == 12 * WIDTH**2 + 13 * WIDTH


def test_equal_blocks_hold_the_same_and_the_first_one_its_input() -> None:
    segments = measured(lowered(3, dropout=0.1), fused=True)
    first, *others = (segments[f"layers.{number}"] for number in range(3))
    assert {(s.saved_bytes, s.parameter_elements) for s in others} == {(first.saved_bytes, first.parameter_elements)}
    assert list(segments) == ["embedding", "layers.0", "layers.1", "layers.2", "head"]


def test_fused_kernels_keep_no_copies_between_operators() -> None:
    program = lowered(1, gated=True)
    fused, plain = (measured(program, fused=fused)["layers.0"] for fused in (True, False))
    kept = 2 + 2 + 6 + 2 + 2 + 2 + 8 + 4  # x, norm, qkv, attention, x, norm, gate and up, their product
    assert kept * SBH <= fused.saved_bytes <= 1.01 * kept * SBH
    assert plain.saved_bytes - fused.saved_bytes >= 2 * (4 + 4 - 2) * SBH  # float32 copies in both norms


def test_recomputing_a_block_keeps_its_input_and_makes_the_rest_again() -> None:
    program = lowered(1, dropout=0.1)
    names = {str(node.meta["operator"]) for node in program.graph.nodes if node.op == "call_function"}
    again = {name for name in names if name.startswith("layers.0") and not name.endswith("/bwd")}
    whole, thin = (measured(program, fused=True, recompute=again)["layers.0"] for again in ((), again))
    assert thin.saved_bytes == 2 * SBH
    assert thin.backward_extra_bytes >= 0.75 * whole.saved_bytes


def test_the_loss_counts_by_its_stack() -> None:
    logits = BATCH * SEQ * VOCAB
    heads = [
        measured(lowered(1), fused=True, loss=loss)["head"]
        for loss in (MEGATRON_LOSS, LossBytes(saved=4, forward=10, backward=12))
    ]
    assert heads[0].saved_bytes == heads[1].saved_bytes
    assert heads[0].forward_extra_bytes == 2 * logits
    assert heads[1].forward_extra_bytes == 6 * logits
    assert heads[1].backward_extra_bytes == 8 * logits


def test_gradients_that_products_add_take_no_memory() -> None:
    apart, added = (measured(lowered(1), fused=True, in_place_gradients=flag)["layers.0"] for flag in (False, True))
    assert added.backward_extra_bytes < apart.backward_extra_bytes


@pytest.mark.exhaustive
@pytest.mark.slow
def test_composed_segments_peak_where_a_storage_tracker_does() -> None:
    errors, mutants = [], []
    for blocks, gated, dtype in itertools.product([1, 3], [False, True], [torch.float32, torch.bfloat16]):
        program = lowered(blocks, gated=gated, dtype=dtype)
        segments = list(measured(program).values())
        tracked = tracked_peak_bytes(split_forward_backward(program), program)
        errors.append(abs(composed(segments) / tracked - 1))
        mutants.append(abs(composed([segments[0], *segments[2:]]) / tracked - 1))
    assert statistics.median(errors) < 0.03
    assert max(errors) < 0.05 < min(mutants)


def composed(segments: list[SegmentMemory]) -> int:
    """The fullest moment of one forward and backward."""
    held, highest = 0, 0
    for piece in segments:
        held += piece.saved_bytes
        highest = max(highest, held + max(piece.forward_extra_bytes, piece.backward_extra_bytes))
    return highest
