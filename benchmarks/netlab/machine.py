"""What a lab asks of the machine: the compiled switch, namespaces, and the removal of what killed labs have left."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from autopar.errors import AutoparError
from autopar.files import cache_directory
from benchmarks.netlab import cores, names

PROBE = 999_999
"""Number of the lab that only tries whether namespaces may be made."""
SOURCE = Path(__file__).with_name("switch.c")
NAMESPACES = Path("/run/netns")
GROUP_GRACE_SECONDS = 5.0
"""How long the processes of a group may take to go once they are killed."""


def built_switch() -> Path:
    """The compiled switch, built once per source. Raises AutoparError where there is no compiler."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    program = cache_directory() / "netlab" / f"switch-{digest}"
    if program.exists():
        return program
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise AutoparError("the emulated network needs a C compiler: install gcc")
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        output = Path(folder) / "switch"
        subprocess.run([compiler, "-O2", "-o", str(output), str(SOURCE)], check=True)
        output.rename(program)
    return program


def why_unavailable() -> str | None:
    """Why this machine cannot run a lab; None where it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "chrt", "setpriv", "cc") if shutil.which(tool) is None]
    if missing:
        return f"missing tools: {', '.join(missing)}"
    if not Path("/dev/net/tun").exists():
        return "the kernel has no TUN devices (/dev/net/tun)"
    probe = names.node_name(names.lab_name(os.getpid(), PROBE), 0)
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add is refused: {made.stderr.strip()}"
    run_ip("netns", "del", probe)
    return None


def remove_leftovers() -> list[str]:
    """End and remove what labs of processes that are gone have left; returns the names."""
    nodes = names.leftovers(os.listdir(NAMESPACES)) if NAMESPACES.exists() else []
    remove_nodes(nodes)
    groups = []
    for directory in (cores.ROOT / "cpu", cores.ROOT):
        if directory.exists():
            groups += [directory / name for name in names.leftovers(os.listdir(directory))]
    remove_groups(groups)
    return [*nodes, *(group.name for group in groups)]


def remove_nodes(nodes: Sequence[str]) -> None:
    """Whatever runs inside of these namespaces is ours: it ends with them."""
    for node in nodes:
        if (NAMESPACES / node).exists():
            listed = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True).stdout
            _kill([int(text) for text in listed.split()])
            run_ip("netns", "del", node)


def remove_groups(groups: Sequence[Path]) -> None:
    for group in groups:
        deadline = time.monotonic() + GROUP_GRACE_SECONDS
        while group.exists():
            _kill([int(text) for text in (group / "cgroup.procs").read_text().split()])
            with contextlib.suppress(OSError):  # busy until the killed processes have gone
                group.rmdir()
                break
            if time.monotonic() > deadline:
                raise AutoparError(f"{group} still holds processes after {GROUP_GRACE_SECONDS:g} s")
            time.sleep(0.02)


def _kill(processes: Sequence[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def run_ip(*arguments: str, text: str | None = None) -> None:
    done = subprocess.run(["ip", *arguments], input=text, capture_output=True, text=True)
    if done.returncode:
        raise AutoparError(f"ip {' '.join(arguments)} failed: {done.stderr.strip()}\n{text or ''}")
