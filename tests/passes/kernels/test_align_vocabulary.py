"""Vocabularies whose rows of logits are not aligned are filled up in narrow dtypes, and nothing else changes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx

from autopar.ops.cross_entropy import aligned_columns
from autopar.passes.kernels.graph_patterns import name_of, shape_of
from tests.passes.hand_plans import run_plan, worst
from tests.passes.kernels import test_use_kernels as small
from tests.passes.lowered_programs import lower

WORDS = 58
TOLERANCE = 2.0**-4
"""Both round to bf16, in other places."""


@pytest.mark.parametrize(("ranks", "words", "columns"), [(1, WORDS, 64), (2, 11402, 5704)])
def test_products_have_aligned_rows_and_equal_results(
    ranks: int, words: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "VOCABULARY", words)
    program, plain, ours, tensors = small.planned("gpt", "bf16", ranks)
    graph = lower(program, ours, 0).graph
    block = words // ranks
    shapes = Counter(shape_of(node) for node in graph.nodes if name_of(node) == "mm")
    rows = small.BATCH * small.LENGTH
    assert shapes[rows, columns] == shapes[columns, small.WIDTH] == 1
    assert not any(block in shape for shape in shapes)
    exact = run_plan(program, plain, tensors)
    assert worst(run_plan(program, ours, tensors), exact) < TOLERANCE

    def spoil(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if name_of(node) == "slice" and node.args[1:] == (1, 0, block):
                node.args = (*node.args[:-1], columns)  # words that nobody counts are counted

    if ranks == 1:  # of many words a few more change little
        assert worst(run_plan(program, ours, tensors, change=spoil), exact) > TOLERANCE


def test_wide_dtypes_and_aligned_vocabularies_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, precision in ((WORDS, None), (64, "bf16")):
        monkeypatch.setattr(small, "VOCABULARY", words)
        program, _, ours, _ = small.planned("gpt", precision, 1)
        assert "constant_pad_nd" not in {name_of(node) for node in lower(program, ours, 0).graph.nodes}


@pytest.mark.parametrize(
    ("words", "dtype", "columns"),
    [(50257, torch.bfloat16, 50264), (50264, torch.float16, 50264), (5, torch.float32, 5), (0, torch.bfloat16, 0)],
)
def test_columns(words: int, dtype: torch.dtype, columns: int) -> None:
    assert aligned_columns(words, dtype) == columns
