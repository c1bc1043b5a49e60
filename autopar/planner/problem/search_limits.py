"""Search: how long the planner may look for the optimum. Every mode returns a valid plan with the gap that is proven.

    autopar.plan(model, inputs, mode="fast")         # SEARCH["fast"]: a few seconds per mesh
    autopar.plan(model, inputs, time_limit=60.0)     # 60 s for everything, whatever the mode says

What `mode=` means is `SEARCH`, here: no other module decides by the name of a mode. What all modes share is
`limits.py`.

Most plans of most models are proven optimal long before the limit, in every mode; where latency rules, as on gloo,
branch and bound may need minutes, and what differs is the gap that remains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.request.search_mode import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a mode allows. All seconds are CPU seconds."""

    exact_seconds: float
    """Limit of one solve without a memory limit."""
    memory_seconds: float
    """Of all solves under a memory limit on one mesh together, which return the best plan that fits."""
    memory_rounds: int
    """How often the budget is tightened by the transient bytes that the lowered program shows."""
    reruns_time: float
    """Of all questions for the fewest reruns on one mesh together, in units of CP-SAT's deterministic time (about five
    CPU seconds each), so that what is found does not depend on the machine; 0: not asked."""
    meshes_seconds: float
    """After which no other mesh is opened."""
    table_entries: float
    """Of the tables of all meshes of more than two axes together that are tried. A mesh of three axes of a Llama has
    three million, and takes about 6 CPU s from prices to its bound; where the limit of entries is met first, what is
    tried depends on the question alone."""
    refined_labels: float
    """Strategies, with recomputation, of a mesh of more than two axes that is fitted into memory: 900,000 took 55 CPU s
    to the proof, 1,300,000 found nothing better in 90."""
    tries_suggestions: bool = True
    """Whether a memory limit that nothing fits makes the planner look among the baselines, and then for changes that
    would fit."""
    tries_pipelines: bool = True
    """Whether pipelines that nobody asked for may be the answer."""
    compares_all_pipelines: bool = False
    """Whether they are planned for every number of rank groups."""
    hidden_shares: tuple[float, ...] = ()
    """Of the communication of parameters, under which meshes are solved again (`choose_step.py`)."""
    hidden_seconds: float = 0.0
    """After which none is solved so any more, there and where memory is short (`hidden_first.py`)."""

    def in_part(self, share: float) -> Search:
        """The same with a part of the time for solves."""
        return replace(
            self,
            exact_seconds=share * self.exact_seconds,
            memory_seconds=share * self.memory_seconds,
            reruns_time=share * self.reruns_time,
        )


SEARCH: dict[Mode, Search] = {
    "fast": Search(
        exact_seconds=1.0,
        memory_seconds=4.0,
        memory_rounds=3,
        reruns_time=0.0,
        meshes_seconds=10.0,
        table_entries=0.0,
        refined_labels=0.0,
        tries_suggestions=False,
        tries_pipelines=False,
        hidden_seconds=20.0,
    ),
    "default": Search(
        exact_seconds=15.0,
        memory_seconds=60.0,
        memory_rounds=3,
        reruns_time=2.0,
        meshes_seconds=60.0,
        table_entries=1.3e7,
        refined_labels=1e6,
        hidden_shares=(0.9, 0.5),
        hidden_seconds=30.0,
    ),
    "max": Search(
        exact_seconds=600.0,
        memory_seconds=300.0,
        memory_rounds=6,
        reruns_time=20.0,
        meshes_seconds=3600.0,
        table_entries=1e9,
        refined_labels=math.inf,
        compares_all_pipelines=True,
        hidden_shares=(0.9, 0.5, 0.75, 0.25),
        hidden_seconds=600.0,
    ),
}
"""Llama-3-8B on 256 devices takes 4 s to the proof."""


def search_of(mode: Mode, time_limit: float | None) -> Search:
    """The limits of a mode; a time limit in seconds for the whole planning takes the place of those of one solve."""
    if time_limit is None:
        return SEARCH[mode]
    seconds = float(time_limit)
    return replace(
        SEARCH[mode],
        exact_seconds=seconds,
        memory_seconds=seconds,
        meshes_seconds=seconds,
        hidden_seconds=min(SEARCH[mode].hidden_seconds, seconds),
    )
