"""Where a save writes: a checkpoint and a series of them have folders of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import ConfigurationError
from autopar.runtime.checkpoints.checkpoint_folders import LATEST, MANIFEST, begin_save


def test_a_single_checkpoint_is_not_written_among_those_of_a_series(tmp_path: Path) -> None:
    """It would be found by no load of the folder: that takes the latest of the series."""
    (tmp_path / LATEST).write_text("{}")
    with pytest.raises(ConfigurationError, match="holds a series of checkpoints: pass keep_last="):
        begin_save(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == [LATEST]


def test_a_series_is_not_begun_in_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(ConfigurationError, match="is a checkpoint and no series"):
        begin_save(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]
