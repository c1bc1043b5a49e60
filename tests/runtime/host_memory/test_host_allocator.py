"""The host's allocator keeps what is freed, unless the user has said otherwise."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from autopar.runtime.host_memory.host_allocator import keep_freed_memory

FAULTS = """
import resource, torch
from autopar.runtime.host_memory.host_allocator import keep_freed_memory
torch.set_num_threads(1)
if {keep}:
    keep_freed_memory()
def step():
    return [torch.ones(10 << 20) for _ in range(3)]
for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(keep: bool) -> int:
    """Page faults of one step that allocates three buffers of 40 MiB, as ten steps before it did.

    Up to four steps pass until the heap has a place for each, since aligned buffers leave gaps between them.
    glibc asks the kernel for each buffer of 32 MiB and more by default; smaller ones may stay in its heap by chance.
    """
    return int(subprocess.check_output([sys.executable, "-c", FAULTS.format(keep=keep)], text=True))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_a_step_that_allocates_what_the_last_one_freed_faults_no_page_in() -> None:
    if not keep_freed_memory():
        pytest.skip("this C library has no such settings, or the environment chooses some")
    if not ctypes.CDLL(None).mallopt(-3, 1 << 30):
        pytest.skip("this version of glibc maps buffers of 32 MiB and more in any case")
    assert _faults(keep=True) < 100 < 4096 < _faults(keep=False)


def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
