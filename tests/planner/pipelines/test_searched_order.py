"""A searched order of a pipeline: no longer than its family, within memory, with a bound; large ones are refused."""

from __future__ import annotations

import pytest

from autopar.errors import ConfigurationError
from autopar.planner.pipelines.choose_pipeline import families_for, try_families
from autopar.planner.pipelines.searched_order import search_order
from autopar.request.pipeline_request import SEARCHED, check_family
from autopar.schedules.check import check_schedule
from tests.planner.pipelines.test_choose_pipeline import _even


def test_an_order_is_found_that_is_no_longer_and_fits() -> None:
    """Four ranks with memory of 1F1B: ZB-H1 waits at the end, a free order less."""
    (family,) = try_families(_even(4, 6.0), 4, 4, ["1f1b"])
    assert family.pipeline is not None
    found, note = search_order(family.pipeline, effort=1.0)
    check_schedule(found.costs.schedule)
    assert found.family == SEARCHED
    assert found.step_seconds < family.pipeline.step_seconds
    assert found.peak_bytes <= 6.0
    assert "searched from 1f1b" in note


def test_a_large_pipeline_is_refused_and_the_name_is_known() -> None:
    (family,) = try_families(_even(8), 4, 32, ["1f1b"])
    assert family.pipeline is not None
    with pytest.raises(ConfigurationError, match="orders at most 240 passes; 4 stages with 32"):
        search_order(family.pipeline)
    check_family(SEARCHED)
    assert "chimera" not in families_for(SEARCHED)
    assert families_for("gpipe") == ("gpipe",)
