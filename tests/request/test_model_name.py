"""What stands for a model, and the precision that a configuration brings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.request.model_name import configured_precision, is_configuration


def test_a_configuration_is_told_from_code() -> None:
    assert is_configuration("hf:config.json")
    assert not is_configuration("package.module:factory")
    assert not is_configuration(None)


@pytest.mark.parametrize(
    ("config", "precision"),
    [({"torch_dtype": "bfloat16"}, "bf16"), ({"dtype": "float16"}, "bf16"), ({"dtype": "float32"}, "fp32"),
     ({"dtype": "float32", "torch_dtype": "bfloat16"}, "fp32"), ({}, None), ({"dtype": None}, None),
     ({"dtype": "float8"}, None), ({"dtype": ["bfloat16"]}, None), ([1], None)],
)  # fmt: skip
def test_a_configuration_brings_its_precision(config: Any, precision: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert configured_precision(f"hf:{tmp_path / 'config.json'}") == precision
    assert configured_precision(f"hf:{tmp_path}") == precision


def test_what_cannot_be_read_brings_none(tmp_path: Path) -> None:
    assert configured_precision(f"hf:{tmp_path / 'none.json'}") is None
    assert configured_precision("package.module:factory") is None
