"""Files of tensors are data: an index that names code is not followed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

import autopar
from autopar.runtime.checkpoints.tensor_files import is_plain, read_metadata, read_tensors, write_tensors
from tests.runtime.checkpoints.small_runs import compiled


class Code:
    """A pickle of it makes a folder where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def test_an_index_that_names_code_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "run")))
    with pytest.raises(autopar.ConfigurationError, match=r"it names posix.mkdir, which no index does"):
        autopar.load(tmp_path, compiled())
    assert not (tmp_path / "run").exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert (tmp_path / "run").exists(), "read as pickle alone, it does what it says"


@pytest.mark.parametrize("content", [b"", b"damaged", pickle.dumps({"a": 1})], ids=["empty", "words", "another"])
def test_what_is_no_index_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(autopar.ConfigurationError, match="is no index of a checkpoint"):
        read_metadata(tmp_path)


@pytest.mark.filterwarnings("error")
def test_one_process_writes_and_reads_without_a_warning(tmp_path: Path) -> None:
    write_tensors({"weight": torch.ones(3)}, tmp_path)
    found = {"weight": torch.zeros(3)}
    read_tensors(found, tmp_path, read_metadata(tmp_path))
    assert torch.equal(found["weight"], torch.ones(3))


def test_plain_data_is_what_is_read_back_without_code() -> None:
    assert is_plain({"a": [1, torch.ones(2), (None, "x")]})
    assert not is_plain({"a": Code(Path("x"))})
