"""The tidy passes in their order: what every captured graph goes through before rules see it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from autopar.passes.runner import Pass
from autopar.passes.tidy.equal_splits import equal_splits_to_views
from autopar.passes.tidy.gather_scatters import gather_scatters
from autopar.passes.tidy.inline_constants import inline_constants
from autopar.passes.tidy.merge_equal import merge_equal
from autopar.passes.tidy.moving_rows import moving_rows
from autopar.passes.tidy.one_spelling import one_spelling
from autopar.passes.tidy.operator_paths import name_operators
from autopar.passes.tidy.phases import PhaseContext, assign_phases
from autopar.passes.tidy.place_casts import place_casts
from autopar.passes.tidy.read_masks import read_masks
from autopar.passes.tidy.remove_noise import remove_dead_code, remove_noise


@dataclass(frozen=True, slots=True, kw_only=True)
class TidyContext:
    """Names of the tangent placeholders, and how many of the returned values the forward pass returns."""

    tangents: frozenset[str]
    num_forward_outputs: int


TIDY_PASSES: tuple[Pass[GraphModule, PhaseContext], ...] = (
    inline_constants,
    remove_noise,
    gather_scatters,
    equal_splits_to_views,
    one_spelling,
    read_masks,
    moving_rows,
    remove_dead_code,
    assign_phases,
    merge_equal,
    remove_dead_code,
    place_casts,
    name_operators,
)
