"""Edits of a plan file that cannot be meant: each names the entry, the axis and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import ConfigurationError
from autopar.passes.overlap.bucket_collectives import KINDS
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import COLLECTIVES

OLD = Path(__file__).parent.parent / "data" / "plan_version_1.json"
Edit = Callable[[dict[str, Any]], object]


def product(document: dict[str, Any]) -> Any:
    """The first product, whose axes split something."""
    return document["operators"]["up/mm#0"]


def whole(document: dict[str, Any]) -> Any:
    """A product that says that it runs whole on the outer axis, and lies as before."""
    product(document)["axes"][0] = None


EDITS: tuple[tuple[str, Edit, str], ...] = (
    ("too few axes", lambda d: d["parameters"]["up.weight"].update(stored=["R"]),
     r"parameters\.up\.weight\.stored has 1 placement; the layouts' mesh has 2 axes \(dp_shard, tp\)"),
    ("a stored sum", lambda d: d["parameters"]["up.weight"].update(stored=["R", "P(sum)"]),
     r"parameters\.up\.weight\.stored on axis 'tp' is P\(sum\), a sum that is not complete: only its gradient"),
    ("a used sum", lambda d: d["parameters"]["up.bias"].update(used=["P(max)", "R"]),
     r"parameters\.up\.bias\.used on axis 'dp_shard' is P\(max\)"),
    ("a shared copy", lambda d: d["parameters"]["up.bias"].update(shared_backward=["R"]),
     r"parameters\.up\.bias\.shared_backward has 1 placement"),
    ("axes of an operator", lambda d: product(d).update(axes=["m"]),
     r"operators\.up/mm#0\.axes has 1 entry; the layouts' mesh has 2 axes"),
    ("an output", lambda d: product(d).update(outputs=[["R", "R", "R"]]),
     r"operators\.up/mm#0\.outputs\[0\] has 3 placements"),
    ("whole, but split", whole,
     r"operators\.up/mm#0 on axis 'dp_shard': axes says null, so the operator runs whole there, but its inputs are"),
    ("split, but whole", lambda d: product(d).update(inputs=[["R", "R"]] * 2, outputs=[["R", "R"]]),
     r"operators\.up/mm#0 on axis 'dp_shard': axes says that it splits 'm', but its inputs are \['R', 'R'\]"),
    ("partial, but whole", lambda d: product(d).update(axes=["partial", "m"], outputs=[["R", "S(0)"]]),
     r"operators\.up/mm#0 on axis 'dp_shard': axes says that partial sums pass through, but"),
    ("shared copies", lambda d: product(d).update(shared_forward=[["R", "R"]] * 2),
     r"operators\.up/mm#0\.shared_forward has 2 entries; the operator has 1 outputs"),
    ("saved and given up", lambda d: d["operators"]["up/mm#0"].update(recompute_at=["up/mm#0/bwd"]),
     r"operators\.up/mm#0\.recompute_at .* recompute is false"),
    ("given up nowhere", lambda d: d["operators"]["up/mm#0"].update(recompute=True, recompute_at=["up/mm#0"]),
     r"operators\.up/mm#0\.recompute_at: 'up/mm#0' is no operator of backward"),
    ("recomputed backward", lambda d: d["operators"]["up/mm#0/bwd"].update(recompute=True),
     r"/bwd\.recompute is true; only operators of forward"),
    ("an input as a sum", lambda d: d["inputs"].update({"args.0": ["P(sum)", "R"]}),
     r"inputs\.args\.0 on axis 'dp_shard' is P\(sum\)"),
    ("a collective that is none", lambda d: d.update(product_chunks={"all_reduces": 2}),
     r"product_chunks\.all_reduces: there is no such collective; write one of all_gather, all_reduce, all_to_all"),
    ("no chunk", lambda d: d.update(product_chunks={"all_reduce": 0}),
     r"product_chunks\.all_reduce is 0; write 1 or more"),
    ("a kind that symmetric memory lacks", lambda d: d.update(symmetric_memory={"all_reduce": ["tp"]}),
     r"symmetric_memory\.all_reduce: write one of all_gather, reduce_scatter"),
    ("a group that is none", lambda d: d.update(symmetric_memory={"all_gather": ["tp+dp_shard"]}),
     r"symmetric_memory\.all_gather names the group 'tp\+dp_shard'; the mesh has the axes dp_shard, tp: write one"),
    ("a size below nothing", lambda d: d.update(bucket_bytes={"all_reduce": -1.0}),
     r"bucket_bytes\.all_reduce is -1\.0; write 0 or more"),
    ("a dim too many", lambda d: d["inputs"].update({"args.0": ["R", "S(2)"]}),
     r"inputs\.args\.0 on axis 'tp' is S\(2\); its shape \[16, 64\] has 2 dims"),
    ("no micro-batch", lambda d: d.update(micro_batches=0), "micro_batches is 0"),
)  # fmt: skip


@pytest.mark.parametrize(("edit", "words"), [edit[1:] for edit in EDITS], ids=[edit[0] for edit in EDITS])
def test_an_edit_that_makes_no_sense_is_named(edit: Edit, words: str) -> None:
    document = json.loads(OLD.read_text())
    Plan.from_json(json.dumps(document).encode())
    edit(document)
    with pytest.raises(ConfigurationError, match=words):
        Plan.from_json(json.dumps(document).encode(), "plan.json")


def test_entries_of_unequal_rank_groups_are_checked() -> None:
    document = json.loads(OLD.read_text())
    entry = {**document["parameters"]["up.weight"], "stored": ["R", "P(sum)"]}
    cut = next(name for name in document["operators"] if not name.endswith("/bwd"))
    document["mesh"] = {"axis_names": ["pp", "dp_shard", "tp"], "shape": [2, 2, 2]}
    stages = [{"name": str(i), "last_operator": end, "rank_group": i} for i, end in enumerate((cut, None))]
    groups = [
        {"first_rank": 4 * i, "shape": [2, 2], "parameters": own} for i, own in enumerate(({}, {"up.weight": entry}))
    ]
    document["pipeline"] = {"schedule": "1f1b", "chunks": 1, "stages": stages, "groups": groups}
    with pytest.raises(ConfigurationError, match=r"pipeline\.groups\[1\]\.parameters\.up\.weight\.stored on axis 'tp'"):
        Plan.from_json(json.dumps(document).encode())
    groups[1]["parameters"] = {}
    assert Plan.from_json(json.dumps(document).encode()).num_ranks == 8


def test_the_kinds_of_collectives_are_those_of_the_passes() -> None:
    assert set(KINDS.values()) == COLLECTIVES
