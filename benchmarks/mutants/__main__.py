"""Plant small faults in every room, one at a time, and see whether the tests notice.

    python -m benchmarks.mutants                        # at least 300 of the last commit; results/mutants.json
    python -m benchmarks.mutants --only autopar.rules   # one room and those inside
    python -m benchmarks.mutants --sample 20            # so many of all that are drawn, to see how long a run takes
    python -m benchmarks.mutants --seconds 200          # survivors meet the slow tests, too, that were left out
    python -m benchmarks.mutants --again                # survivors of the results meet the tests that changed since

The first run of a commit records which tests reach which lines (`reach.py`; minutes, `--tests` records some of them).
Each mutant is then written into a copy of the tree, and the tests that reach its line run until one fails
(`choose_tests.py`, `warm.py`). What is done stands in a file of JSON lines beside the copies; the same command goes on
where it was stopped. Needs the library `coverage` (the extra `mutants`).

A mutant that no test notices has survived, unless `equivalent.json` says why it changes nothing. One that has survived
is found again at a later commit by its path and its change, and its row then says which commit that was.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.files import cache_directory
from benchmarks.mutants.choose_tests import SECONDS, Chosen, choose, further, own_files
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
GONE = "gone"
"""The outcome of a mutant whose line a later commit does not have."""
CHANGED_SECONDS = 120.0
"""That the files of tests that changed since may take; those about the mutant's own module run alone before."""
IMPORTED = ("torch", "transformers")
"""Libraries that a warm process imports where no record says which."""


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
        """Copies of the tree, byte code by the hash of its source, since a mutant may have the date of the original.
        Sources are written each time: a run that was killed left its mutants in them."""
        with tree_at(ROOT, commit) as sources:
            for worker in range(WORKERS):
                is_new = not self.tree(worker).exists()
                shutil.copytree(
                    sources, self.tree(worker), symlinks=True, dirs_exist_ok=True, ignore=None if is_new else _links
                )
                if is_new:
                    command = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."]
                    subprocess.run([sys.executable, *command], cwd=self.tree(worker), check=False)

    def record(self, tests: Sequence[str]) -> None:
        """Run the suite once, or these tests of it; what a stopped run left is thrown away."""
        if not (self.reach / "done").exists():
            shutil.rmtree(self.reach, ignore_errors=True)
            command = ["-m", "pytest", "-p", "benchmarks.mutants.reach", "--reach", str(self.reach), "-m", "not gpu"]
            command += ["--numprocesses", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder", *tests]
            subprocess.run([sys.executable, *command], cwd=self.tree(0), env=environment(self.tree(0)), check=False)
            (self.reach / "done").touch()


def _links(folder: str, names: Sequence[str]) -> list[str]:
    """Those that are links."""
    return [name for name in names if Path(folder, name).is_symlink()]


def environment(tree: Path) -> dict[str, str]:
    """One thread, and modules of this copy."""
    paths = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


Mutant = tuple[str, Mutation]
"""Its room, and what is changed."""
Chooser = Callable[[Mutation], Chosen]


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


def try_all(place: Place, imported: Sequence[str], mutants: Sequence[Mutant], chosen: Chooser, *, bound: float) -> None:
    """Each mutant, on `WORKERS` processes; a row is written when it is done. bound: seconds by which `chosen` chose."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    preload = [name for name in imported if name.partition(".")[0] not in OURS]
    lock = threading.Lock()

    def serve(number: int) -> None:
        worker = Worker(place.tree(number), preload)
        try:
            while True:
                room, mutation = waiting.get_nowait()
                row = {**row_of(worker, room, mutation, chosen(mutation)), "bound": bound}
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


def row_of(worker: Worker, room: str, mutation: Mutation, chosen: Chosen) -> dict[str, Any]:
    """What became of one mutant; "unreached" where no test comes by."""
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
    gone = [row for row in rows if row["outcome"] == GONE]
    survivors = [row for row in rows if survived(row, equivalent)]
    same = len(rows) - len(killed) - len(gone) - len(survivors)
    by_room: dict[str, list[int]] = {}
    for row in rows:
        counts = by_room.setdefault(row["room"], [0, 0])
        counts[0] += not survived(row, equivalent)
        counts[1] += 1
    return {
        "mutants": len(rows),
        "killed": len(killed),
        "equivalent": same,
        "killed_share": len(killed) / max(1, len(killed) + len(survivors)),
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


def survived(row: Mapping[str, Any], equivalent: Mapping[str, str]) -> bool:
    """Whether no test noticed it, though one could have."""
    return row["outcome"] not in (*KILLED, GONE) and change_of(row) not in equivalent


def _is_missing(row: Mapping[str, Any] | None, bound: float) -> bool:
    """Whether a mutant is to be tried: its row says that it was not, or that it met less than it shall."""
    return row is None or (row["outcome"] not in KILLED and row["bound"] < bound)


def try_drawn(place: Place, reach: Reach, mutants: Sequence[Mutant], seconds: float) -> list[dict[str, Any]]:
    """What is not done, and survivors again where tests of so many seconds are more than they met; the rows of all."""
    done = {row["mutant"]: row for row in read_rows(place.rows)}

    def chosen(mutation: Mutation) -> Chosen:
        reaching = reach.tests(mutation.path, mutation.line)
        found = choose(mutation.path, reaching, reach.seconds, seconds)
        before = done.get(mutation.name)
        if before is None:
            return found
        return further(found, set(choose(mutation.path, reaching, reach.seconds, before["bound"]).tests))

    def is_missing(mutation: Mutation) -> bool:
        row = done.get(mutation.name)
        return _is_missing(row, seconds) and (row is None or row["left_out"] > 0)

    try_all(place, reach.imported, [mutant for mutant in mutants if is_missing(mutant[1])], chosen, bound=seconds)
    names = {mutation.name for _, mutation in mutants}
    last = {row["mutant"]: row for row in read_rows(place.rows)}
    return [row for name, row in last.items() if name in names]


def try_survivors(place: Place, document: Mapping[str, Any], equivalent: Mapping[str, str], commit: str) -> list[Any]:
    """The rows of a results file, those of its survivors anew: as the commit of `place` has them, under the files of
    tests that changed since. "gone" where the commit has no such line."""
    compared = ["git", "diff", "--name-only", "--diff-filter=d", document["commit"], commit, "--", "tests"]
    changed = subprocess.run(compared, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [path for path in changed if Path(path).name.startswith("test_")]
    places: dict[str, list[Mutation]] = {}
    for mutations in rooms(place.tree(0)).values():
        for mutation in mutations:
            places.setdefault(f"{mutation.path}: {mutation.shown}", []).append(mutation)
    mutants, named = [], {}
    rows = [dict(row) for row in document["rows"]]
    for row in rows:
        if survived(row, equivalent):
            line = int(row["mutant"].split(":")[1])
            nearest = min(places.get(change_of(row), ()), key=lambda found: abs(found.line - line), default=None)
            row["commit"] = commit
            if nearest is None:
                row["outcome"] = GONE
            else:
                mutants.append((row["room"], nearest))
                named[nearest.name] = row
    for bound in (0.0, CHANGED_SECONDS):
        done = {row["mutant"]: row for row in read_rows(place.rows)}

        def chosen(mutation: Mutation, is_all: bool = bound > 0.0) -> Chosen:
            tests = files if is_all else own_files(mutation.path, files)
            return Chosen(tests=tuple(tests), seconds=CHANGED_SECONDS, left_out=0)

        missing = [mutant for mutant in mutants if _is_missing(done.get(mutant[1].name), bound)]
        try_all(place, IMPORTED, missing, chosen, bound=bound)
    for name, found in {row["mutant"]: row for row in read_rows(place.rows) if row["mutant"] in named}.items():
        named[name].update({**found, "tests": named[name]["tests"] + found["tests"], "commit": commit})
    return rows


def main() -> None:
    """Draw, try what is not done, print and keep. Exits with 1 where a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT, help="mutants over all rooms")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--commit", default="HEAD", help="whose tree is tried")
    parser.add_argument("--only", metavar="ROOM", help="this package and those inside")
    parser.add_argument("--sample", type=int, metavar="N", help="try N of those that are drawn; nothing is kept")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of tests that a mutant has to pass")
    parser.add_argument("--again", action="store_true", help="the survivors of the results only")
    parser.add_argument(
        "--folder", type=Path, default=cache_directory() / "mutants", help="of copies and of what is done"
    )
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="record these tests only")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    commit = commit_of(ROOT, arguments.commit)
    place = Place(arguments.folder / commit[:12])
    place.prepare(commit)
    equivalent = json.loads(EQUIVALENT.read_text())
    if arguments.again:
        document = json.loads(arguments.output.read_text())
        content = {"command": document["command"], "commit": document["commit"]}
        content |= {"tests_not_used": document["tests_not_used"]}
        rows = try_survivors(place, document, equivalent, commit)
    else:
        place.record(arguments.tests)
        reach = Reach.read(place.reach, place.tree(0))
        print(f"{len(reach.seconds)} tests passed; {len(reach.not_passed)} were skipped or failed and are not used")
        chosen = drawn(rooms(place.tree(0)), arguments.count, arguments.seed)
        mutants = [(room, mutation) for room, found in chosen.items() for mutation in found]
        if arguments.only:
            mutants = [mutant for mutant in mutants if f"{mutant[0]}.".startswith(f"{arguments.only}.")]
        if arguments.sample:
            mutants = random.Random(arguments.seed).sample(mutants, arguments.sample)
        rows = try_drawn(place, reach, mutants, arguments.seconds)
        command = f"python -m benchmarks.mutants --count {arguments.count} --seed {arguments.seed}"
        command += f" --seconds {arguments.seconds:g}"
        content = {"command": command, "commit": commit, "tests_not_used": list(reach.not_passed)}
    found = summarised(rows, equivalent)
    print(json.dumps(found, indent=1))
    if not arguments.sample and not arguments.only:
        write_results(arguments.output, {**content, **found, "rows": rows})
    sys.exit(1 if found["survivors"] else 0)


if __name__ == "__main__":
    main()
