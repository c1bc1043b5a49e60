"""Checkpoints of one process: killed anywhere, damaged anywhere, refused, resumed.

`tests/distributed/test_checkpoint.py` has those of several."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

import autopar
from autopar.runtime.checkpoints import checkpoint, checkpoint_folders
from autopar.runtime.parameters import full_tensor
from tests.runtime.checkpoints.small_runs import bits, compiled, filled, trained

WRITES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
"""What Python says before it changes files (`sys.addaudithook`)."""


def dead_before_write(number: int, action: Callable[[], object]) -> bool:
    """Whether a fork of this process that runs `action`, killed before its write of that number, came so far."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    left = [number]

    def count(event: str, _: object) -> None:
        if event in WRITES:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(count)
        action()
    finally:
        os._exit(0)


def killed_saves(folder: Path) -> Iterator[float | str]:
    """What is loaded from a checkpoint of ones, over which twos are saved, killed before each write in turn: the value
    of all tensors, or the error. A last one of a save that nothing killed."""
    module = compiled()
    alive, number = False, 0
    while not alive:
        filled(module, 1.0)
        autopar.save(folder, module, step=1)
        filled(module, 2.0)
        write = number

        def save() -> None:
            autopar.save(folder, module, step=2)

        alive = not dead_before_write(write, save)
        filled(module, 3.0)
        yield loaded_value(folder, module)
        number += 1


def loaded_value(folder: Path, module: autopar.ParallelModule) -> float | str:
    """The value that all tensors have and the step says, else what is wrong."""
    try:
        step = autopar.load(folder, module).step
    except autopar.AutoparError as error:
        return str(error)
    values = {float(value) for tensor in module.state_dict().values() for value in full_tensor(tensor).unique()}
    return float(step) if values == {float(step)} else f"a mix of {values} at step {step}"


def test_killed_before_any_write_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    found = list(killed_saves(tmp_path / "run"))
    assert set(found) == {1.0, 2.0}
    assert found == sorted(found), "the old one, and from one write on the new one"
    assert len(found) > 8
    autopar.save(tmp_path / "run", compiled())
    assert len(os.listdir(tmp_path / "run")) == 2, "what killed saves left is removed"


def test_in_one_folder_a_killed_save_leaves_a_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: tensors are written over those that the manifest names, as without the rename; files unchecked."""
    monkeypatch.setattr(checkpoint_folders, "secrets", SimpleNamespace(token_hex=lambda _: "00000000"))
    monkeypatch.setattr(Path, "mkdir", lambda path, **_: os.makedirs(path, exist_ok=True))
    monkeypatch.setattr(checkpoint, "_damage", lambda *_: "")
    assert any(found not in (1.0, 2.0) for found in killed_saves(tmp_path / "run"))


def test_a_first_save_that_is_killed_is_no_checkpoint(tmp_path: Path) -> None:
    module = compiled()
    assert dead_before_write(4, lambda: autopar.save(tmp_path / "run", module))
    with pytest.raises(autopar.ConfigurationError, match="its first save was cut off"):
        autopar.load(tmp_path / "run", module)
    assert autopar.save(tmp_path / "run", module) == tmp_path / "run"
    autopar.load(tmp_path / "run", module)


def flipped(path: Path, places: int) -> Iterator[int]:
    """Flip one bit in each of so many bytes, spread over the file; the file is whole behind each."""
    content = path.read_bytes()
    for place in range(0, len(content), max(1, len(content) // places)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        yield place
    path.write_bytes(content)


def test_a_flipped_bit_is_found_in_every_file(tmp_path: Path) -> None:
    module = compiled()
    folder = autopar.save(tmp_path / "run", module, torch.optim.SGD(module.parameters(), lr=0.1), extra={"epoch": 3})
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == [".metadata", "__0_0.distcp", "manifest.json"]
    filled(module, 5.0)
    before = bits(module)
    for path in files:
        for place in flipped(path, 40):
            with pytest.raises(autopar.ConfigurationError, match=f"{path.name}.* is (not what|damaged)|newer autopar"):
                autopar.load(folder, module)
            assert bits(module) == before, place


def test_unchecked_a_flipped_bit_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: without checksums other weights are taken without a word."""
    module = compiled()
    filled(module, 1.0)
    folder = autopar.save(tmp_path / "run", module)
    tensors = next(folder.rglob("*.distcp"))
    content = tensors.read_bytes()
    place = content.index(torch.ones(4, 4).numpy().tobytes())
    tensors.write_bytes(content[: place + 3] + bytes([content[place + 3] ^ 1]) + content[place + 4 :])
    monkeypatch.setattr(checkpoint, "_damage", lambda *_: "")
    assert "mix" in str(loaded_value(folder, module))


def test_a_file_that_is_gone_or_short_is_named(tmp_path: Path) -> None:
    module = compiled()
    folder = autopar.save(tmp_path / "step-00000007", module)
    autopar.save(tmp_path / "step-00000006", module)
    tensors = next(folder.rglob("*.distcp"))
    size = tensors.stat().st_size
    os.truncate(tensors, size - 1)
    with pytest.raises(autopar.ConfigurationError, match=f"has {size - 1:,} bytes, {size:,} were.*step-00000006"):
        autopar.load(folder, module)
    tensors.unlink()
    with pytest.raises(autopar.ConfigurationError, match=f"{tensors.name} cannot be read"):
        autopar.load(folder, module)


def test_a_series_keeps_the_last_and_loads_the_latest(tmp_path: Path) -> None:
    module = compiled()
    for step in (1, 5, 9, 3):
        filled(module, float(step))
        autopar.save(tmp_path, module, step=step, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["latest.json", "step-00000003", "step-00000009"]
    assert loaded_value(tmp_path, module) == 3.0, "the one that was saved last, of a run that went back"
    assert loaded_value(tmp_path / "step-00000009", module) == 9.0
    assert autopar.load(tmp_path, module).folder == tmp_path / "step-00000003"


def test_a_killed_save_of_a_series_leaves_the_latest_as_it_was_or_the_new_one(tmp_path: Path) -> None:
    module = compiled()
    number, alive, found = 0, False, []
    while not alive:
        for step in (1, 2):
            filled(module, float(step))
            autopar.save(tmp_path, module, step=step, keep_last=2)
        filled(module, 3.0)
        alive = not dead_before_write(number, lambda: autopar.save(tmp_path, module, step=3, keep_last=2))
        found.append(loaded_value(tmp_path, module))
        number += 3
    assert set(found) == {2.0, 3.0}
    for step in (4, 5):
        autopar.save(tmp_path, module, step=step, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["latest.json", "step-00000004", "step-00000005"]


def test_a_full_disk_leaves_the_checkpoint_that_was_there(tmp_path: Path) -> None:
    module = compiled()
    filled(module, 1.0)
    autopar.save(tmp_path / "run", module, step=1)
    filled(module, 2.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        with pytest.raises(autopar.ConfigurationError, match=r"cannot write .*run"):
            autopar.save(tmp_path / "run", module, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert loaded_value(tmp_path / "run", module) == 1.0
    assert len(os.listdir(tmp_path / "run")) == 2


def test_what_is_no_place_for_a_checkpoint_is_refused(tmp_path: Path) -> None:
    module = compiled()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for path, what in (
        ("file", "is a file, and a checkpoint is a folder"),
        ("file/below", "Not a directory"),
    ):
        with pytest.raises(autopar.ConfigurationError, match=what):
            autopar.save(tmp_path / path, module)
    for path, what in (("file", "it is a file"), ("folder", "has no manifest.json"), ("none", "nothing of that name")):
        with pytest.raises(autopar.ConfigurationError, match=what):
            autopar.load(tmp_path / path, module)
    autopar.save(tmp_path / "folder", module)
    with pytest.raises(autopar.ConfigurationError, match="is a checkpoint and no series"):
        autopar.save(tmp_path / "folder", module, keep_last=1)
    with pytest.raises(autopar.ConfigurationError, match="keep_last=0"):
        autopar.save(tmp_path / "folder", module, keep_last=0)
    assert (tmp_path / "file").read_text() == "mine"


def test_what_users_keep_beside_stays(tmp_path: Path) -> None:
    module = compiled()
    for _ in range(2):
        autopar.save(tmp_path, module)
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "checkpoint-data-mine").mkdir(exist_ok=True)
    assert {"notes.txt", "checkpoint-data-mine"} < set(os.listdir(tmp_path))


def test_a_checkpoint_without_manifest_is_loaded_unchecked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = compiled()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.25)
    trained(module, optimizer, range(1))
    before = bits(module, optimizer)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = {"0": {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}}
    state = {names[id(parameter)]: values for parameter, values in optimizer.state.items()}
    random = {"base_seed": torch.tensor(module.base_seed), "calls": torch.tensor(module.calls)}
    old = {"model": module.state_dict(), "random": random, "optimizer": {"state": state, "groups": groups}}
    state_dict_saver.save(old, checkpoint_id=tmp_path / "old")
    trained(module, optimizer, range(1, 2))
    with caplog.at_level(logging.WARNING):
        autopar.load(tmp_path / "old", module, optimizer)
    assert "read unchecked" in caplog.text
    assert bits(module, optimizer) == before
    autopar.save(tmp_path / "old", module)
    assert {path.suffix for path in (tmp_path / "old").iterdir()} == {".json", ""}, "its files are gone"


def test_a_seed_above_63_bits_is_kept(tmp_path: Path) -> None:
    module = compiled()
    module.base_seed, module.calls = (1 << 63) + 12345, 3
    seed = module.seed()
    autopar.save(tmp_path / "checkpoint", module)
    module.base_seed, module.calls = 1, 1
    autopar.load(tmp_path / "checkpoint", module)
    assert module.seed() == seed


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_a_run_that_is_loaded_goes_on_bit_by_bit(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    module = compiled()
    optimizer = kind(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    trained(module, optimizer, range(3), scheduler)
    extra = {"scheduler": scheduler, "sampler": {"epoch": 1, "position": torch.tensor([3, 4])}}
    autopar.save(tmp_path / "run", module, optimizer, extra=extra, step=3)
    losses = trained(module, optimizer, range(3, 6), scheduler)
    whole = bits(module, optimizer)
    again = kind(module.parameters(), lr=7.0)
    other = torch.optim.lr_scheduler.MultiStepLR(again, [2, 4], gamma=0.5)
    loaded = autopar.load(tmp_path / "run", module, again, extra={"scheduler": other})
    assert loaded.step == 3
    assert loaded.extra["sampler"]["position"].tolist() == [3, 4]
    assert trained(module, again, range(3, 6), other) == losses
    assert bits(module, again) == whole
