"""`autopar doctor`: what this machine can do, and how to mend what it cannot.

Each check gives a status (ok, missing, broken), what was found, and what to do; only a broken one makes it fail.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import click
import torch
import torch.distributed as dist
from rich.console import Console

from autopar._compat import NEWEST_TESTED_TORCH
from autopar.cli.output import as_json_option, print_document
from autopar.errors import AutoparError
from autopar.files import cache_directory
from autopar.hardware.cluster import Cluster, measured_cluster_path
from autopar.hardware.operator_profile import operator_profile_path
from autopar.report.terminal_tables import table
from autopar.runtime.collectives.flight_record import VARIABLE
from autopar.runtime.kernels.inductor import cpp_compiler

Status: TypeAlias = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one check. mend: what to do, empty where all is well."""

    name: str
    status: Status
    found: str
    mend: str = ""


@click.command()
@as_json_option
def doctor(as_json: bool) -> None:
    """Say what this machine can do, and how to mend what it cannot.

    Example: autopar doctor
    """
    findings = [check() for check in CHECKS]
    if as_json:
        fields = ("name", "status", "found", "mend")
        print_document({"findings": [{field: getattr(one, field) for field in fields} for one in findings]})
    else:
        rows = [(one.name, one.status, one.found, one.mend) for one in findings]
        Console().print(table("this machine", ("check", "", "found", "mend"), rows))
    broken = [one.name for one in findings if one.status == "broken"]
    if broken:
        raise AutoparError(f"broken: {', '.join(broken)}; see the last column")


def check_torch() -> Finding:
    """Planning and running need torch in a range that the tests cover."""
    newest = ".".join(map(str, NEWEST_TESTED_TORCH))
    found = f"torch {torch.__version__}, Python {platform.python_version()}"
    if tuple(map(int, torch.__version__.split(".")[:2])) > NEWEST_TESTED_TORCH:
        return Finding("torch", "missing", found, f"newer than tested: install torch {newest} if something fails")
    return Finding("torch", "ok", found)


def check_gloo() -> Finding:
    """One process joins a group with itself: host names and the network interface work."""
    if dist.is_initialized():
        return Finding("gloo", "ok", f"a group of {dist.get_world_size()} processes runs")
    with tempfile.TemporaryDirectory() as folder:
        try:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            return Finding("gloo", "broken", first, "name the interface: GLOO_SOCKET_IFNAME=lo")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return Finding("gloo", "ok", "collectives on the CPU run")


def check_gpu() -> Finding:
    """A GPU is for training; planning for GPUs needs none."""
    if torch.cuda.is_available():
        return Finding("GPU", "ok", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return Finding("GPU", "missing", "none: plans can be made for GPUs, and run on CPU processes")


def check_nccl() -> Finding:
    """Several GPUs talk to each other through NCCL."""
    if not torch.cuda.is_available():
        return Finding("NCCL", "missing", "no GPU that needs it")
    if not dist.is_nccl_available():
        return Finding("NCCL", "broken", "this build of torch has none", "install a CUDA build of torch for Linux")
    found: Any = torch.cuda.nccl
    return Finding("NCCL", "ok", ".".join(map(str, found.version())))


RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Entries of torch's flight recorder, the first that is set; 2000 where none is (torch 2.13, FlightRecorder.hpp)."""


def check_flight_record() -> Finding:
    """Where a collective hangs, a record of the last ones says which, and who has not come."""
    ours = os.environ.get(VARIABLE, "") or tempfile.gettempdir()
    size = next((os.environ[name] for name in RECORDER_SIZES if name in os.environ), "2000")
    found = f"ours in {ours}" if ours != "0" else "ours writes no file"
    if ours == "0" or size == "0":
        off = f"{found}, torch's recorder is {'off' if size == '0' else 'on'}"
        return Finding("flight record", "missing", off, f"unset {VARIABLE} and {' and '.join(RECORDER_SIZES)}")
    return Finding("flight record", "ok", f"{found}, with {size} entries of torch's")


def check_peers() -> Finding:
    """GPUs of a machine that read each other's memory need no copy through the host."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return Finding("peer access", "missing", f"{count} GPUs: there is nobody to read from")
    pairs = [pair for pair in itertools.permutations(range(count), 2) if not torch.cuda.can_device_access_peer(*pair)]
    if pairs:
        found = f"{len(pairs)} of {count * (count - 1)} pairs cannot, as GPU {pairs[0][0]} of {pairs[0][1]}"
        return Finding("peer access", "missing", found, "collectives go through the host: see `nvidia-smi topo -m`")
    return Finding("peer access", "ok", f"every pair of {count} GPUs")


DRIVER_FIELDS = ("driver_version", "power.limit", "power.default_limit", "clocks.max.sm", "clocks_event_reasons.active")
"""What nvidia-smi is asked per GPU."""
IDLE_REASONS = 0x1
"""Of `clocks_event_reasons.active`: slow as nothing runs."""


def check_driver() -> Finding:
    """A power limit below the default, or a clock that something holds down, makes every prediction too fast."""
    if not torch.cuda.is_available():
        return Finding("driver", "missing", "no GPU that needs one")
    rows = _asked_of_driver()
    if not rows:
        return Finding("driver", "missing", "nvidia-smi is not there, or too old to say", "install the driver's tools")
    slow = []
    for number, (_, limit, default, _, reasons) in enumerate(rows):
        if _number(limit) < _number(default):
            slow.append(f"GPU {number} is limited to {limit} of {default} W")
        if int(reasons, 16) & ~IDLE_REASONS:
            slow.append(f"the clock of GPU {number} is held down ({reasons})")
    driver, _, _, clock, _ = rows[0]
    if slow:
        return Finding("driver", "missing", f"{driver}; {slow[0]}", "nvidia-smi -q -d PERFORMANCE,POWER says why")
    return Finding("driver", "ok", f"{driver}, up to {clock} MHz")


def _asked_of_driver() -> list[list[str]]:
    """The fields of every GPU, as text; none where nvidia-smi is not there, fails, or does not know a field."""
    command = ["nvidia-smi", f"--query-gpu={','.join(DRIVER_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(DRIVER_FIELDS) and row[-1].startswith("0x")]


def _number(text: str) -> float:
    """Watts; 0 where a GPU does not say."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def check_triton() -> Finding:
    """Kernels for GPUs; without it torch's run."""
    if importlib.util.find_spec("triton") is None:
        mend = "" if not torch.cuda.is_available() else "pip install 'autopar[kernels]'"
        return Finding("triton", "missing", "not installed: torch's kernels run", mend)
    return Finding("triton", "ok", importlib.metadata.version("triton"))


def check_compiler() -> Finding:
    """Inductor, an emit backend, compiles C++."""
    compiler = cpp_compiler()
    if compiler is None:
        mend = "install g++, or name a compiler in CXX"
        return Finding("C++ compiler", "missing", "none: inductor cannot compile for CPUs", mend)
    return Finding("C++ compiler", "ok", compiler)


def check_transformers() -> Finding:
    """`hf:` models on the command line."""
    if importlib.util.find_spec("transformers") is None:
        return Finding("transformers", "missing", "no hf: models", "pip install 'autopar[hf]'")
    return Finding("transformers", "ok", importlib.metadata.version("transformers"))


def check_profile() -> Finding:
    """Plans for this machine are priced by its own measurements, once there are some."""
    if torch.cuda.is_available():
        path = operator_profile_path(torch.cuda.get_device_name())
    else:
        path = measured_cluster_path(os.cpu_count() or 1)
    if path.exists():
        return Finding("profile", "ok", str(path))
    return Finding("profile", "missing", f"priced by {Cluster.detect().profile}", "autopar profile")


def check_cache() -> Finding:
    """Profiles are kept here."""
    folder = cache_directory()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if parent.is_dir() and os.access(parent, os.W_OK):
        return Finding("cache", "ok", str(folder))
    return Finding("cache", "broken", f"{folder} cannot be written", "set AUTOPAR_CACHE to a folder of yours")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_torch,
    check_gloo,
    check_gpu,
    check_nccl,
    check_flight_record,
    check_peers,
    check_driver,
    check_triton,
    check_compiler,
    check_transformers,
    check_profile,
    check_cache,
)
