"""Hugging Face models are traced with simpler decisions, and every decision is restored."""

from __future__ import annotations

import os

import pytest

from autopar.capture import capture, huggingface
from autopar.errors import CaptureError
from benchmarks.zoo.registry import zoo_model

SWITCH = "TRANSFORMERS_DISABLE_TORCH_CHECK"


def test_image_tokens_are_captured_because_their_count_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = zoo_model("llava")
    assert capture(model, (), inputs).training
    monkeypatch.setattr(huggingface, "_WITHOUT_CHECKS", {})
    with pytest.raises(CaptureError, match="decides by the values"):
        capture(model, (), inputs)


def test_the_switch_for_checks_is_as_before_after_a_capture() -> None:
    before = os.environ.get(SWITCH)
    model, inputs = zoo_model("gpt2")
    capture(model, (), inputs)
    assert os.environ.get(SWITCH) == before
