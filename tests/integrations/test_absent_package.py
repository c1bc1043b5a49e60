"""An integration whose package is not there says how to get it; nothing else loads it."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib, sys
import autopar
from autopar.errors import ConfigurationError
for package, module in {cases}:
    for name in list(sys.modules):
        if name.split(".")[0] in ("accelerate", "lightning", "peft", package):
            del sys.modules[name]
    sys.modules[package] = None
    try:
        importlib.import_module(f"autopar.integrations.{{module}}")
    except ConfigurationError as error:
        print(error)
    del sys.modules[package]
"""
CASES = [
    ("accelerate", "accelerate"), ("accelerate", "transformers"), ("lightning", "lightning"), ("lightning", "fabric"),
    ("peft", "peft"), ("tensorboard", "tensorboard"), ("wandb", "wandb"),
]  # fmt: skip


def test_every_integration_names_the_extra_that_brings_its_package() -> None:
    done = subprocess.run([sys.executable, "-c", CODE.format(cases=CASES)], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == len(CASES)
    for (package, _), line in zip(CASES, lines, strict=True):
        assert f"needs the package {package}" in line
        assert f"pip install 'autopar[{package}]'" in line
