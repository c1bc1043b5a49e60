"""A running lab: made on entry, gone on exit, whatever happens in between.

    with Lab(PRESETS["flat-200mbit"]) as lab:
        outcome = lab.run(["python", "train.py"], seconds=60)
        outcome.link_bytes.payload             # (4, 4) bytes from node to node
        lab.fork(train, seconds=60)            # a function of ours instead, called as train(limit_cores)

What a killed lab left behind is found by name and removed when the next one starts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from autopar.errors import AutoparError
from autopar.files import cache_directory
from benchmarks.netlab import cores, names
from benchmarks.netlab.counters import LinkBytes, new_counters, read_counters
from benchmarks.netlab.forks import Fork, fork
from benchmarks.netlab.machine import built_switch, remove_groups, remove_leftovers, remove_nodes, run_ip
from benchmarks.netlab.presets import Network
from benchmarks.netlab.processes import Process, end_sessions, last_lines, wait_for
from benchmarks.netlab.shaping import DEVICE, node_commands, rank_command, rank_environment, switch_command

LIFE_SECONDS = 3600.0
"""After this the switch ends by itself, should nobody have ended it."""
FIRST_PORT = 29_500

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command did on all ranks. exit_codes: by rank, negative for a signal."""

    exit_codes: tuple[int, ...]
    link_bytes: LinkBytes
    seconds: float


class Lab:
    """The nodes of one network; use it as a context manager."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._name = names.lab_name(os.getpid(), next(_numbers))
        self._nodes = [names.node_name(self._name, node) for node in range(network.nodes)]
        self._groups: list[Path] = []
        self._switch: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-netlab-")
        self._runs = 0

    @property
    def counters(self) -> Path:
        """The file that `read_counters` reads."""
        return Path(self._folder.name) / "counters"

    @property
    def cache(self) -> Path:
        """Where profiles measured on this network are kept; ranks find them there."""
        return network_cache(self.network)

    def __enter__(self) -> Lab:
        """Make everything. Raises AutoparError where the machine does not allow it, and leaves nothing then."""
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def run(
        self,
        command: Sequence[str],
        *,
        seconds: float = 600.0,
        environment: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> Outcome:
        """Run `command` on every rank; rank 0 writes to our output (unless `quiet`), others are shown where they fail.

        Raises AutoparError where a rank fails or has not ended after `seconds`, with the last lines of its output.
        """
        return self._all(lambda rank, log: self._start(rank, command, environment or {}, log), seconds, quiet)

    def fork(
        self, call: Callable[[Callable[[], None]], None], *, seconds: float = 600.0, quiet: bool = False
    ) -> Outcome:
        """Run `call` on every rank as a fork of this process, else as `run`.

        A rank begins with all of the machine's cores, and has its share from where it calls the argument of `call`.
        """
        return self._all(lambda rank, log: self._fork(rank, call, log), seconds, quiet)

    def _all(self, start: Callable[[int, Path | None], Process], seconds: float, quiet: bool) -> Outcome:
        before, begin = read_counters(self.counters, self.network.nodes), time.monotonic()
        logs = [Path(self._folder.name) / f"rank{rank}.log" for rank in range(self.network.num_ranks)]
        self._runs += 1
        with contextlib.ExitStack() as stack:
            ranks: list[Process] = []
            stack.callback(end_sessions, ranks)
            for rank, log in enumerate(logs):
                ranks.append(start(rank, None if rank == 0 and not quiet else log))
            late = wait_for(ranks, begin + seconds)
        codes = tuple(process.wait() for process in ranks)
        if late:
            raise AutoparError(f"ranks {late} had not ended after {seconds:g} s\n{last_lines(late, logs)}")
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            first = [rank for rank in failed if codes[rank] != -signal.SIGTERM] or failed
            raise AutoparError(f"ranks {first} failed ({[codes[r] for r in first]})\n{last_lines(first, logs)}")
        carried = read_counters(self.counters, self.network.nodes) - before
        return Outcome(exit_codes=codes, link_bytes=carried, seconds=time.monotonic() - begin)

    def stall(self, node: int) -> None:
        """From now on drop every packet from and to a node, as a link that fails without a word."""
        run_ip("-n", self._nodes[node], "link", "set", DEVICE, "down")

    def _start(
        self, rank: int, command: Sequence[str], more: Mapping[str, str], log: Path | None
    ) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self._environment(rank), **more}
        line = rank_command(self._nodes[rank // self.network.ranks_per_node], command)
        if self._groups:
            line = cores.join_command(self._groups[rank], line)
        with contextlib.ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("wb"))
            return subprocess.Popen(
                line, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def _fork(self, rank: int, call: Callable[[Callable[[], None]], None], log: Path | None) -> Fork:
        def limit_cores() -> None:
            if self._groups:
                cores.join(self._groups[rank])

        node = self._nodes[rank // self.network.ranks_per_node]
        return fork(functools.partial(call, limit_cores), namespace=node, environment=self._environment(rank), log=log)

    def _environment(self, rank: int) -> dict[str, str]:
        """What a rank finds beside what we have."""
        return {
            **rank_environment(self.network, rank, FIRST_PORT + self._runs),
            "AUTOPAR_CACHE": str(self.cache),
            "AUTOPAR_NETLAB_COUNTERS": str(self.counters),
        }

    def _make(self) -> None:
        program = built_switch()
        for node in self._nodes:
            run_ip("netns", "add", node)
        new_counters(self.counters)
        command = switch_command(program, self.counters, self.network, self._nodes, LIFE_SECONDS)
        self._switch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._switch.stdout is not None
        assert self._switch.stderr is not None
        if self._switch.stdout.readline() != "ready\n":
            raise AutoparError(f"the switch did not start: {self._switch.stderr.read().strip()}")
        for number, node in enumerate(self._nodes):
            run_ip("-n", node, "-batch", "-", text="\n".join(node_commands(number)))
        if self.network.cores_per_rank is not None:
            directory = cores.cores_directory()
            for rank in range(self.network.num_ranks):
                name = names.rank_name(self._name, rank)
                self._groups.append(cores.make_group(name, self.network.cores_per_rank, directory))

    def _remove(self) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()
        remove_nodes(self._nodes)
        remove_groups(self._groups)
        self._groups = []
        self._folder.cleanup()


def network_cache(network: Network) -> Path:
    """The cache folder of processes on a network: their profile is another one than this machine's."""
    return cache_directory() / "netlab" / network.name
