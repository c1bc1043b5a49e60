"""The emulated cluster itself: real namespaces, where root may make them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.errors import AutoparError
from benchmarks.netlab import names
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.machine import NAMESPACES, remove_leftovers, why_unavailable
from benchmarks.netlab.presets import Network

REASON = why_unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SMALL = Network(nodes=2, ranks_per_node=1, mbit=100.0, latency_us=500.0, cores_per_rank=None)
BYTES = 1_000_000
TRANSFER = f"""
import os, socket, time
if os.environ["RANK"] == "0":
    server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    connection = server.accept()[0]
    begin, left = time.monotonic(), {BYTES}
    while left:
        left -= len(connection.recv(left))
    assert time.monotonic() - begin > 0.9 * 8e-8 * {BYTES}, "faster than the wire"
else:
    for _ in range(200):
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            break
        except OSError:
            time.sleep(0.02)
    connection.sendall(bytes({BYTES}))
    connection.close()
"""


def ours() -> list[str]:
    """What bears this process's name."""
    groups = Path("/sys/fs/cgroup/cpu")
    found = [*NAMESPACES.iterdir(), *(groups.iterdir() if groups.exists() else ())]
    return [path.name for path in found if path.name.startswith(f"{names.PREFIX}-{os.getpid()}-")]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(SMALL) as made:
        yield made
    assert ours() == []


def test_payload_is_counted_on_the_link_that_carries_it_and_takes_its_time(lab: Lab) -> None:
    outcome = lab.run([sys.executable, "-c", TRANSFER], seconds=60.0)
    assert outcome.link_bytes.payload[1, 0] == BYTES
    assert outcome.link_bytes.payload[0, 1] == 0
    assert outcome.link_bytes.packets[1, 0] > BYTES
    assert outcome.link_bytes.dropped.sum() == 0


def test_the_output_of_a_failing_rank_is_told_and_the_others_end(lab: Lab) -> None:
    script = 'test "$RANK" = 0 && exec sleep 1000; echo no such thing; exit 3'
    with pytest.raises(AutoparError, match=r"ranks \[1\] failed \(\[3\]\)\n--- rank 1:\nno such thing"):
        lab.run(["sh", "-c", script], seconds=60.0)


def test_a_late_command_is_ended(lab: Lab) -> None:
    with pytest.raises(AutoparError, match=r"ranks \[0, 1\] had not ended after 0.5 s"):
        lab.run(["sleep", "1000"], seconds=0.5)


FORKED = """
import os, pathlib, sys
from dataclasses import replace
from benchmarks.netlab import names
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.presets import Network

folder, known = pathlib.Path(sys.argv[1]), ["what the parent knows"]

def tell(limit_cores):
    rank, groups = os.environ["RANK"], pathlib.Path("/proc/self/cgroup")
    before = groups.read_text()
    limit_cores()
    inside = names.PREFIX in groups.read_text() and names.PREFIX not in before
    (folder / rank).write_text(f"{known[0]}, {inside}, {os.readlink('/proc/self/ns/net')}")

def fail(limit_cores):
    raise SystemExit("no such thing") if os.environ["RANK"] == "1" else RuntimeError("no more of it")

network = Network(nodes=2, ranks_per_node=1, mbit=100.0, latency_us=500.0, cores_per_rank=0.5)
with Lab(network) as lab:
    lab.fork({"tell": tell, "fail": fail}[sys.argv[2]], seconds=60.0, quiet=True)
(folder / "parent").write_text(os.readlink("/proc/self/ns/net"))
"""
"""A process of its own: that of the tests has threads where they run in parallel, and cannot be forked."""


def forked(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FORKED, str(folder), what], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_fork_is_a_rank_that_has_its_share_of_cores_once_it_asks(tmp_path: Path) -> None:
    done = forked(tmp_path, "tell")
    assert done.returncode == 0, done.stderr
    said = [(tmp_path / rank).read_text().split(", ") for rank in ("0", "1")]
    assert [each[:2] for each in said] == [["what the parent knows", "True"]] * 2
    assert len({(tmp_path / "parent").read_text(), *(each[2] for each in said)}) == 3


def test_a_fork_that_fails_says_why_and_never_comes_back_to_the_parents_code(tmp_path: Path) -> None:
    done = forked(tmp_path, "fail")
    assert done.returncode == 1
    assert re.search(r"ranks \[0, 1\] failed(.|\n)*no more of it(.|\n)*no such thing", done.stderr), done.stderr
    assert not (tmp_path / "parent").exists()


def test_a_process_with_threads_is_not_forked(lab: Lab) -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        with pytest.raises(AutoparError, match="cannot be forked: start the ranks as commands"):
            lab.fork(lambda limit_cores: None, seconds=60.0, quiet=True)
    finally:
        over.set()
        other.join()


def test_what_fails_on_the_way_in_leaves_nothing_and_other_labs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with Lab(SMALL):
        before = ours()
        monkeypatch.setattr("benchmarks.netlab.lab.node_commands", lambda node: ["link set nothing up"])
        with pytest.raises(AutoparError, match="Cannot find device"), Lab(SMALL):
            pass
        assert sorted(ours()) == sorted(before) != []
    assert ours() == []


def test_what_a_killed_lab_left_is_removed() -> None:
    script = (
        "import sys\nfrom benchmarks.netlab.lab import Lab\nfrom benchmarks.netlab.presets import Network\n"
        "with Lab(Network(nodes=1, ranks_per_node=1, mbit=1.0, latency_us=0.0, cores_per_rank=None)) as lab:\n"
        "    lab.run(['sh', '-c', 'echo running; exec sleep 1000'])\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "running\n"
    node = names.node_name(names.lab_name(killed.pid, 0), 0)
    assert (NAMESPACES / node).exists()
    killed.kill()
    killed.wait()
    assert node in remove_leftovers()
    assert not (NAMESPACES / node).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_forks_end_with_their_lab_however_it_ends(number: signal.Signals) -> None:
    script = (
        "import os, time\nfrom benchmarks.netlab.lab import Lab\nfrom benchmarks.netlab.presets import Network\n"
        "from benchmarks.netlab.processes import ended_by_signals\n"
        "def rank(limit_cores):\n    limit_cores()\n    print(os.getpid(), flush=True)\n    time.sleep(1000)\n"
        "with ended_by_signals(), Lab(Network(nodes=1, ranks_per_node=1, mbit=1.0, latency_us=0.0)) as lab:\n"
        "    lab.fork(rank)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdigit()
    process.send_signal(number)
    process.wait(60.0)
    assert process.stdout.read() == "", "the pipe closes once the rank has gone"
    left = remove_leftovers() if number == signal.SIGKILL else []
    assert any(str(process.pid) in name for name in left) == (number == signal.SIGKILL)
    assert not [path for path in NAMESPACES.iterdir() if str(process.pid) in path.name]
    switches = subprocess.run(["pgrep", "-f", f"switch-.*-{process.pid}-"], capture_output=True, text=True).stdout
    assert switches == ""


def test_a_terminated_command_line_takes_everything_down() -> None:
    command = [sys.executable, "-m", "benchmarks.netlab", "--nodes", "2", "--", "sh", "-c", "echo running; sleep 1000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60.0) == 128 + signal.SIGTERM
    assert not [path for path in NAMESPACES.iterdir() if str(process.pid) in path.name]
