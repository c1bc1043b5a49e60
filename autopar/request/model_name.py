"""Model names: what stands for a model on the command line and in the question of a plan.

    hf:config.json              a Hugging Face configuration, which is data
    pkg.module:factory          a function, which is code and runs

`capture/models.py` builds what they name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autopar.errors import ConfigurationError
from autopar.files import decoded_json, file_content

HUGGINGFACE = "hf:"
DTYPE_ENTRIES = ("dtype", "torch_dtype")
"""Under which a configuration says the dtype of its weights; the second is the older name."""
PRECISION_OF_DTYPE: Mapping[str, str] = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}
"""A model that was published in 16 bits multiplies in 16 bits; of the two, autopar has bf16."""


def is_configuration(spec: object) -> bool:
    """Whether a name stands for a Hugging Face configuration: for data, not for code."""
    return isinstance(spec, str) and spec.startswith(HUGGINGFACE)


def configured_precision(spec: str) -> str | None:
    """The precision that a Hugging Face configuration asks for by the dtype of its weights; None where it says none,
    where it cannot be read (building it says why), and for a factory."""
    if not is_configuration(spec):
        return None
    path = Path(spec.removeprefix(HUGGINGFACE))
    try:
        config = decoded_json(file_content(path / "config.json" if path.is_dir() else path, spec), spec)
    except ConfigurationError:
        return None
    entries = config if isinstance(config, dict) else {}
    said = next((entries[name] for name in DTYPE_ENTRIES if entries.get(name)), None)
    return PRECISION_OF_DTYPE.get(said) if isinstance(said, str) else None
