"""Names of the rungs of the memory ladder, and what a plan has on the host by them (`planner/memory/rungs.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.plans.plan_value import MASK, ROUNDED_BITS, Prediction

KEPT, RECOMPUTED, IN_SPANS, ON_HOST = "kept on the device", "recomputed", "recomputed in spans", "on the host"
STATES_ON_HOST = "parameters on the host"
IN_FORM: Mapping[str, str] = {MASK: "as bits"} | {form: f"in {bits} bits" for form, bits in ROUNDED_BITS.items()}
"""In which form values wait, as a plan says it (`saved_as`) -> rung."""


def host_bytes(predicted: Prediction) -> float:
    """The most that one rank has on its host: what forward leaves there beside parameters with all that belongs to
    them."""
    return sum(predicted.bytes_by_rung.get(rung, 0.0) for rung in (ON_HOST, STATES_ON_HOST))
