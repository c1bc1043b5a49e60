"""Plant small faults in every room, one at a time, and see whether the tests notice.

    python -m benchmarks.mutants                        # at least 300 of the last commit; results/mutants.json
    python -m benchmarks.mutants --only autopar.rules   # one room and those inside
    python -m benchmarks.mutants --sample 20            # so many of all that are drawn, to see how long a run takes

The first run of a commit records which tests reach which lines (`reach.py`; minutes, `--tests` records some of them).
Each mutant is then written into a copy of the tree, and the tests that reach its line run until one fails
(`choose_tests.py`, `warm.py`). What is done stands in a file of JSON lines beside the copies; the same command goes on
where it was stopped. Needs the library `coverage` (the extra `mutants`).

A mutant that no test notices has survived, unless `equivalent.json` says why it changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.files import cache_directory
from benchmarks.mutants.choose_tests import choose
from benchmarks.mutants.draw import drawn, rooms
from benchmarks.mutants.operators import Mutation
from benchmarks.mutants.reach import Reach
from benchmarks.mutants.warm import OURS
from benchmarks.results import write_results
from benchmarks.structure.source_tree import commit_of, tree_at

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "benchmarks" / "results" / "mutants.json"
EQUIVALENT = Path(__file__).with_name("equivalent.json")
COUNT, SEED, WORKERS = 300, 0, 2
SLOWEST, STARTING = 3.0, 20.0
"""A mutant is late after so many times what its tests took, and so many seconds more."""
KILLED = ("failed", "not imported", "timeout", "died")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one commit is tried: copies of its tree, what reaches which line, and what is done."""

    folder: Path

    def tree(self, worker: int) -> Path:
        return self.folder / f"tree{worker}"

    @property
    def reach(self) -> Path:
        return self.folder / "reach"

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl"

    def prepare(self, commit: str) -> None:
        """Copies of the tree, byte code by the hash of its source, since a mutant may have the date of the original."""
        for worker in range(WORKERS):
            if not self.tree(worker).exists():
                with tree_at(ROOT, commit) as tree:
                    shutil.copytree(tree, self.folder / "new", symlinks=True, dirs_exist_ok=True)
                command = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."]
                subprocess.run([sys.executable, *command], cwd=self.folder / "new", check=False)
                (self.folder / "new").rename(self.tree(worker))

    def record(self, tests: Sequence[str]) -> None:
        """Run the suite once, or these tests of it; what a stopped run left is thrown away."""
        if not (self.reach / "done").exists():
            shutil.rmtree(self.reach, ignore_errors=True)
            command = ["-m", "pytest", "-p", "benchmarks.mutants.reach", "--reach", str(self.reach), "-m", "not gpu"]
            command += ["--numprocesses", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder", *tests]
            subprocess.run([sys.executable, *command], cwd=self.tree(0), env=environment(self.tree(0)), check=False)
            (self.reach / "done").touch()


def environment(tree: Path) -> dict[str, str]:
    """One thread, and modules of this copy."""
    paths = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Worker:
    """A warm process and the copy of the tree that it runs in."""

    def __init__(self, tree: Path, preload: Sequence[str]) -> None:
        self.tree = tree
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.mutants.warm"],
            cwd=tree, env=environment(tree), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._ask(list(preload))

    def _ask(self, question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def tried(self, mutation: Mutation, tests: Sequence[str], seconds: float) -> dict[str, Any]:
        """What the tests say of the tree with the mutation, which is taken back."""
        file = self.tree / mutation.path
        content = file.read_bytes()
        try:
            file.write_bytes(mutation.applied(content))
            answer: dict[str, Any] = self._ask({"tests": list(tests), "seconds": seconds})
        finally:
            file.write_bytes(content)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def try_all(place: Place, reach: Reach, mutants: Sequence[tuple[str, Mutation]]) -> None:
    """Each mutant, on `WORKERS` processes; a row is written when it is done."""
    waiting: queue.SimpleQueue[tuple[str, Mutation]] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    preload = [name for name in reach.imported if name.partition(".")[0] not in OURS]
    lock = threading.Lock()

    def serve(number: int) -> None:
        worker = Worker(place.tree(number), preload)
        try:
            while True:
                room, mutation = waiting.get_nowait()
                row = row_of(worker, reach, room, mutation)
                with lock, place.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{row['outcome']:12} {row['seconds']:6.1f} s  {mutation.name}  {row['test']}", flush=True)
        except queue.Empty:
            worker.close()

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def row_of(worker: Worker, reach: Reach, room: str, mutation: Mutation) -> dict[str, Any]:
    """What became of one mutant; "unreached" where no test comes by."""
    chosen = choose(mutation.path, reach.tests(mutation.path, mutation.line), reach.seconds)
    found: dict[str, Any] = {"outcome": "unreached", "test": "", "seconds": 0.0}
    if chosen.tests:
        found = worker.tried(mutation, chosen.tests, STARTING + SLOWEST * chosen.seconds)
    return {
        "mutant": mutation.name,
        "room": room,
        **found,
        "tests": len(chosen.tests),
        "tests_seconds": chosen.seconds,
        "left_out": chosen.left_out,
    }


def summarised(rows: Sequence[Mapping[str, Any]], equivalent: Mapping[str, str]) -> dict[str, Any]:
    """The share that is killed of all that could be, and the names of the others."""
    killed = [row for row in rows if row["outcome"] in KILLED]
    same = [row for row in rows if row["outcome"] not in KILLED and change_of(row) in equivalent]
    survivors = [row for row in rows if row not in killed and row not in same]
    by_room: dict[str, list[int]] = {}
    for row in rows:
        counts = by_room.setdefault(row["room"], [0, 0])
        counts[0] += row in killed or row in same
        counts[1] += 1
    return {
        "mutants": len(rows),
        "killed": len(killed),
        "equivalent": len(same),
        "killed_share": len(killed) / max(1, len(rows) - len(same)),
        "outcomes": {
            name: sum(row["outcome"] == name for row in rows) for name in sorted({r["outcome"] for r in rows})
        },
        "survivors": [f"{row['mutant']} ({row['outcome']}, {row['tests']} tests)" for row in survivors],
        "rooms": {room: f"{done} of {total}" for room, (done, total) in sorted(by_room.items())},
    }


def change_of(row: Mapping[str, Any]) -> str:
    """The path and the change of a row, as `equivalent.json` names it: its line may move."""
    place, _, change = str(row["mutant"]).partition(" ")
    return f"{place.partition(':')[0]}: {change}"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The complete lines of what is done."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main() -> None:
    """Draw, try what is not done, print and keep. Exits with 1 where a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT, help="mutants over all rooms")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", metavar="ROOM", help="this package and those inside")
    parser.add_argument("--sample", type=int, metavar="N", help="try N of those that are drawn; nothing is kept")
    parser.add_argument(
        "--folder", type=Path, default=cache_directory() / "mutants", help="of copies and of what is done"
    )
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="record these tests only")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    commit = commit_of(ROOT)
    place = Place(arguments.folder / commit[:12])
    place.prepare(commit)
    place.record(arguments.tests)
    chosen = drawn(rooms(place.tree(0)), arguments.count, arguments.seed)
    mutants = [(room, mutation) for room, found in chosen.items() for mutation in found]
    if arguments.only:
        mutants = [mutant for mutant in mutants if f"{mutant[0]}.".startswith(f"{arguments.only}.")]
    if arguments.sample:
        mutants = random.Random(arguments.seed).sample(mutants, arguments.sample)
    names = {mutation.name for _, mutation in mutants}
    done = {row["mutant"] for row in read_rows(place.rows)}
    missing = [mutant for mutant in mutants if mutant[1].name not in done]
    reach = Reach.read(place.reach, place.tree(0))
    print(
        f"{len(reach.seconds)} tests passed, and {len(reach.not_passed)} did not (skipped or failed) and are not used"
    )
    try_all(place, reach, missing)
    rows = [row for row in read_rows(place.rows) if row["mutant"] in names]
    found = summarised(rows, json.loads(EQUIVALENT.read_text()))
    print(json.dumps(found, indent=1))
    if not arguments.sample and not arguments.only:
        command = f"python -m benchmarks.mutants --count {arguments.count} --seed {arguments.seed}"
        not_used = list(reach.not_passed)
        write_results(
            arguments.output, {"command": command, "commit": commit, **found, "tests_not_used": not_used, "rows": rows}
        )
    sys.exit(1 if found["survivors"] else 0)


if __name__ == "__main__":
    main()
