"""What is made inside of the context is collected at its end, and the collector is as it was."""

from __future__ import annotations

import gc
import weakref

from autopar.young_garbage import young_garbage_only


class Circle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_circles_end_with_the_context() -> None:
    before = gc.get_threshold()
    with young_garbage_only():
        seen = weakref.ref(Circle())
        assert seen() is not None
    assert seen() is None
    assert gc.get_threshold() == before


def test_where_the_collector_is_off_it_stays_off() -> None:
    gc.disable()
    try:
        with young_garbage_only():
            seen = weakref.ref(Circle())
        assert seen() is not None
        assert not gc.isenabled()
    finally:
        gc.enable()
