"""The flight record names collectives that do not end, numbered per group, with the operator and the size of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.collectives import host_graphs
from autopar.runtime.collectives.flight_record import CAPACITY, RECORD, VARIABLE, FlightRecord
from autopar.runtime.collectives.progress import HERE, RankProgress


def test_collectives_are_numbered_per_group_and_the_ended_ones_say_so() -> None:
    record = FlightRecord()
    record.end(record.begin("all_gather", "up.weight (forward)", (0, 1), 2 << 20))
    record.begin("all_reduce", "loss/sum#0", (0, 1, 2, 3), 4)
    record.begin("reduce_scatter", "head/linear#0 (bwd)", (0, 1), 8 << 20)
    first, second, third = record.last(3)
    assert first.startswith("all_gather of up.weight (forward), #1 over ranks 0, 1 (2.0 MiB): ended after ")
    assert second.startswith("all_reduce of loss/sum#0, #1 over ranks 0, 1, 2, 3 (4 B): under way for ")
    assert third.startswith("reduce_scatter of head/linear#0 (bwd), #2 over ranks 0, 1 (8.0 MiB): under way for ")


def test_the_oldest_are_forgotten_and_numbers_go_on() -> None:
    record = FlightRecord()
    for _ in range(CAPACITY + 1):
        record.begin("all_reduce", "x", (0, 1), 4)
    lines = record.last(2 * CAPACITY)
    assert len(lines) == CAPACITY
    assert "#2 over" in lines[0]
    assert f"#{CAPACITY + 1} over" in lines[-1]


def test_the_file_holds_ours_and_torchs_and_errors_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    record = FlightRecord()
    record.begin("all_reduce", "x", (0, 1), 4)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        text = record.told(["last on rank 1: nothing"])
    finally:
        dist.destroy_process_group()
    (path,) = tmp_path.glob("autopar-flight-*-rank0.json")
    assert text == f"last on rank 1: nothing; the last collectives of this rank stand in {path}"
    found = json.loads(path.read_text())
    assert found["collectives"][-1].startswith("all_reduce of x, #1 over ranks 0, 1 (4 B): under way")
    assert [entry["input_sizes"] for entry in found["torch"]][-1] == [[3]]


def test_no_file_is_written_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    assert FlightRecord().told() == ""


def test_what_torch_runs_is_noted_with_its_operator_and_of_ours_the_end_too(tmp_path: Path) -> None:
    """As on a GPU: bools are left to torch's collective."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        ours = host_graphs.all_reduce(torch.ones(8), "sum", group, "loss/sum#0")
        assert "loss/sum#0" in RECORD.last(1)[0]
        assert "under way" in RECORD.last(1)[0]
        host_graphs.wait(ours)
        assert "(32 B): ended after " in RECORD.last(1)[0]
        host_graphs.wait(host_graphs.all_reduce(torch.ones(8, dtype=torch.bool), "max", group, "mask/any#0"))
    finally:
        dist.destroy_process_group()
    assert str(HERE.collective).startswith("all_reduce of mask/any#0, #")
    assert "over ranks 0 (8 B): given to torch for" in RECORD.last(1)[0]


def test_an_error_of_nccl_has_the_record_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    error = RuntimeError("NCCL communicator was aborted on rank 0")
    with pytest.raises(RuntimeError, match="aborted"), RankProgress().inside("call", 1):
        raise error
    notes = getattr(error, "__notes__", None)
    assert notes is None or "the last collectives of this rank stand in" in notes[0]  # Python 3.10 has no notes
    assert len(list(tmp_path.iterdir())) == 1
