"""Planning needs nothing that Windows or macOS lacks: their absence is played in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

LACKING = {
    "win32": (("resource", "fcntl", "pwd", "grp", "termios"), ("fork", "sched_getaffinity", "getuid", "uname")),
    "darwin": ((), ("sched_getaffinity",)),
}
"""Platform -> modules and functions of `os` that it does not have."""

SCRIPT = """
import os, sys
import torch, numpy, ortools, transformers, click, rich.progress, filelock  # what others take is not ours
import torch.distributed.tensor, torch._inductor.compile_fx
for name in {modules!r}:
    sys.modules[name] = None
for name in {functions!r}:
    if hasattr(os, name):
        delattr(os, name)
sys.platform = {platform!r}
import autopar, autopar.api, autopar.cli.commands, autopar.demo.journey, autopar.runtime.step_log
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
loss = lambda output, batch: output.sum()
plan = autopar.plan(model, {{"input": torch.randn(16, 8)}}, cluster="4 H100-SXM", loss_fn=loss, mode="fast")
print(plan.mesh.shape)
"""


@pytest.mark.exhaustive(sample="win32")
@pytest.mark.slow
@pytest.mark.parametrize("platform", sorted(LACKING))
def test_a_plan_is_made_without_what_a_platform_lacks(platform: str) -> None:
    modules, functions = LACKING[platform]
    script = SCRIPT.format(modules=modules, functions=functions, platform=platform)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().startswith("(")
