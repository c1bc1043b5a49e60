"""Model names: what stands for a model on the command line and in the question of a plan.

    hf:config.json              a Hugging Face configuration, which is data
    pkg.module:factory          a function, which is code and runs

`capture/models.py` builds what they name.
"""

from __future__ import annotations

HUGGINGFACE = "hf:"


def is_configuration(spec: object) -> bool:
    """Whether a name stands for a Hugging Face configuration: for data, not for code."""
    return isinstance(spec, str) and spec.startswith(HUGGINGFACE)
