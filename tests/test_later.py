"""Names whose modules are loaded when they are first used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.later import later, names_later

CODE = "def double(x, *, by=2):\n    return x * by\n"


def test_the_first_call_loads_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_load.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    double = later("slow_to_load", "double")
    assert double.__name__ == "double"
    assert "slow_to_load" not in sys.modules
    assert (double(3), double(3, by=4)) == (6, 12)
    assert "slow_to_load" in sys.modules


def test_a_name_of_a_package_is_looked_up_once() -> None:
    namespace: dict[str, Any] = {"__name__": "some_package"}
    lookup = names_later(namespace, {"sqrt": "math"})
    assert lookup("sqrt")(9.0) == 3.0
    assert namespace["sqrt"] is lookup("sqrt")
    with pytest.raises(AttributeError, match="module 'some_package' has no attribute 'cbrt'"):
        lookup("cbrt")
