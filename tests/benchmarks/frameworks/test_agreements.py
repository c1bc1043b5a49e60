"""The verdict over two runs; each limit is shown to bind."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.frameworks.agreements import judged
from benchmarks.frameworks.framework_row import Run, row

ALONE = Run(losses=[2.0, 1.0], weights={"w": torch.ones(4)}, metrics={"accuracy": 0.5})
ROW = row("accelerate", "a feature", lambda stand: ALONE)


def test_equal_runs_work_and_a_further_line_is_named() -> None:
    assert judged(ROW, ALONE, [ALONE, ALONE]).word == "works as it is"
    changed = judged(replace(ROW, change="dims"), ALONE, [ALONE, ALONE])
    assert (changed.word, changed.says) == ("works with a change", "dims")


def test_losses_weights_metrics_and_other_ranks_each_differ_by_themselves() -> None:
    for wrong in (
        replace(ALONE, losses=[2.0, 1.0001]),
        replace(ALONE, losses=[2.0]),
        replace(ALONE, losses=[2.0, float("nan")]),
        replace(ALONE, weights={"w": torch.full((4,), 1.0001)}),
        replace(ALONE, weights={"v": torch.ones(4)}),
        replace(ALONE, metrics={"accuracy": 0.6}),
        replace(ALONE, metrics={}),
    ):
        assert judged(ROW, ALONE, [wrong, wrong]).word == "differs", wrong
    assert judged(ROW, ALONE, [ALONE, replace(ALONE, losses=[2.0, 1.1])]).says == "ranks have different losses"


def test_bf16_is_held_to_its_mean_loss() -> None:
    loose = replace(ROW, precision="bf16")
    near, far = replace(ALONE, losses=[2.01, 0.99]), replace(ALONE, losses=[2.1, 1.0])
    assert judged(loose, ALONE, [near, near]).word == "works as it is"
    assert judged(loose, ALONE, [far, far]).word == "differs"


def test_only_errors_of_autopar_with_the_words_are_refusals() -> None:
    refusing = replace(ROW, refused="fp32 or bf16")
    error = "Traceback\nautopar.errors.ConfigurationError: pass fp32 or bf16"
    assert judged(refusing, "", error).word == "refused"
    assert judged(refusing, "", "ValueError: pass fp32 or bf16").word == "fails"
    assert judged(refusing, "", "autopar.errors.ConfigurationError: no").word == "fails"
    assert judged(refusing, "", [ALONE]).says == "not refused with fp32 or bf16"
    assert judged(ROW, ALONE, error).says == "autopar.errors.ConfigurationError: pass fp32 or bf16"
    assert judged(ROW, "ValueError: x", [ALONE]).word == "fails"
