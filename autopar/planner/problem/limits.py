"""Limits: every number that decides what the search tries, in one table. What a mode allows beside them:
`search_limits.py`.

LIMITS.certified_gap                                         1e-3
replace(LIMITS, slower_pipelines=math.inf)                   for a test that wants all of them played

A limit cuts off work, never a proof: the bound of a plan counts what was left out. Tolerances of one solve stand with
the solver and with the problem of one mesh (`solver/`, `mesh_plan.py`, `within_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Names say the unit where there is one: seconds are CPU seconds; shares and factors are of what the text names."""

    # which meshes

    axes_always_tried: int = 2
    """Meshes of up to this many axes are all tried: their tables are small."""
    axes_of_exact_nesting: int = 3
    """Up to this many axes a mesh has every plan of its coarser ones (`strategies.MOST_CHANGES`)."""
    entries_per_axis: int = 36
    """An axis multiplies the entries of the tables by about this: six choices per operator, on both sides of an edge.
    """
    coarser_starts: int = 3
    """From so many coarser meshes a plan is taken: blocks may nest in another order there, and cost more here."""
    least_exposed_share: float = 0.01
    """Meshes of more axes are left out where communication that shows takes less than this part of the played step of
    the best plan on fewer, and so are sums that take communication as hidden, or other meshes under them: a rule, no
    proof, as other splits could make the computation cheaper too. Each takes 5 to 20 CPU s (Llama-3-8B on 256 H100:
    0.5 %, and no mesh has cheaper operators by more than 0.1 %; on 16, where memory is short: 0.3 %, and the sums of
    four meshes are 0.1 % apart)."""
    far_answer: float = 0.95
    """Meshes of more axes are left out where another answer takes at most this part of the best optimum on fewer: they
    save less than that (Llama-3-8B on two nodes with a slow network: 5 %; on 256 H100, where memory is short and the
    other answer is 0.86 of it: 0.3 %), and each takes 4 to 15 CPU s to solve."""
    bound_rounding: float = 1e-9
    """Relative difference below which a bound counts as reached."""
    certified_gap: float = 1e-3
    """A candidate is dropped, too, whose bound is that of the best one, where that has a gap of at most this."""

    # fitting one mesh into memory

    fits_maybe: float = 1.2
    """Of the memory limit: what rows of moments count beyond it may still fit when lowered, as kernels of ours hold
    less."""
    unused_share: float = 0.03
    """Part of the memory limit that may stay unused by a plan for which time was given up."""
    least_relief_of_spans: float = 0.02
    """Part of what backward holds that spans of blocks made again together must save, to be tried beside single blocks.
    """
    least_on_host: float = 5e-4
    """Part of all parameters, or of all saved values, that could wait on the host that one must be, to be asked for."""
    least_in_form: float = 5e-4
    """Part of all that could be saved in less room that a value must be, to be asked for."""
    price_of_hidden_copies: float = 0.05
    """Part of the seconds of a copy that one hidden behind kernels costs: of two that hide the shorter is better."""
    hidden_copies_share: float = 0.9
    """Part of the seconds of kernels behind which copies are counted on to hide."""
    ahead_share: float = 0.15
    """Part of the memory limit, at most, that stays free for copies under way: two of the largest value that could wait
    on the host would take most of it where that is the logits of a long sequence, which need not be what waits."""
    room_of_early_gathers: float = 0.05
    """Part of the memory limit that stays free for gathers ahead, where the sum takes them as hidden and they are not:
    2 GiB of 40 for blocks of Llama-3-8B, of which one takes 0.4."""
    shown_beyond_the_sum: float = 0.05
    """Part of the sum by which the played step is longer where they are not; elsewhere what is left out is 2 %."""
    nested_rooms: tuple[float, ...] = (1.0, 0.93, 0.85, 0.7)
    """Parts of the room for what is saved and made again, in which nested spans are cut: what is passed through needs
    some. The first ones with which the rows hold are solved."""
    most_operators_of_reruns: int = 64
    """Up to so many operators of forward a step is small enough to ask for the fewest reruns of all: a chain of 61
    takes 2 CPU s a question, one of 101 takes 6, and either found nothing better than spans."""
    least_relief_of_reruns: float = 1e-3
    """Part of the objective that what runs again must cost, for it to be asked whether less would do."""
    close_answer: float = 1.5
    """Another answer up to so much above the optimum without a memory limit is probably faster than what fits."""
    time_share_if_close: float = 0.25
    """Of the time for searches under the memory limit, that is left where another answer is close."""
    least_memory_seconds: float = 4.0
    """CPU seconds that these searches keep all the same, if the mode allows so many: bounds and plans of 2,200
    operators take 3."""
    least_memory_share: float = 0.4
    """Of the time for searches under the memory limit, that each of them gets in any case: solves which begin with the
    answer of an earlier one need no more."""
    memory_seconds_per_variable: float = 2e-3
    """CPU seconds, likewise: a solve of 5,400 variables which begins with the answer of an earlier one takes 2 to 8."""
    start_share: float = 0.3
    """Part of the time of a solve under the memory limit that its start may take."""
    moment_rounds: int = 2
    """How often moments at which a solution holds more than the limit become rows, before its program is measured."""
    feasibility_seconds: float = 5.0
    """By the clock, of one question whether a set of constraints can be met."""

    # micro-batches

    parts_must_promise: float = 1.5
    """More parts are tried only where some mesh without a memory limit is so much faster than another answer."""
    parts_least_saved: float = 0.01
    """Part of the cost that more parts must be able to save: their program alone takes as long as a few meshes."""
    parts_least_relief: float = 0.02
    """More parts are tried only while they need at least this share less memory than the number before."""

    # baselines, and plans that are chosen by their played step

    open_gap: float = 1e-2
    """A gap above this asks the baselines for help."""
    time_share_if_shown: float = 0.1
    """Of the time of a search, for baselines that are no answer: a pipeline is faster than any plan without stages.
    """
    played_least_gain: float = 0.01
    """A played step must be shorter by this share to take the place of the plan that is best by the sum."""
    shares_under_memory: tuple[float, ...] = (0.9, 0.5)
    """Of the communication of parameters that are taken as hidden first, where memory is short: a tenth shows, or where
    that is played longer than half of it may be, half."""
    hidden_meshes: int = 4
    """Meshes on which communication is taken as hidden: those with the smallest sums."""
    time_share_if_played: float = 0.2
    """Of the time of a search, for one whose result is played in any case."""

    # pipelines that nobody asked for: which are looked at

    promising_share: float = 0.8
    """An estimate below this part of a step without stages is far below it."""
    estimated_groups: int = 64
    """Rank groups of a pipeline that is estimated, at most."""
    estimated_tensor: int = 8
    """Devices of a node over which the weights of an estimated pipeline are split."""
    estimated_parts: tuple[int, ...] = (1, 2, 4)
    """Micro-batches per rank group that are estimated, beside the number that gives every data rank one sample."""
    sharing_cost: float = 0.1
    """Part of the step by which an estimate grows where data ranks share a sample, per halving of the samples."""
    alone_cost: float = 0.03
    """The same for micro-batches of one sample: their program is always traced, while those of other sizes are computed
    from two traces (`capture/family.py`)."""
    finer_cost: float = 0.01
    """By which a mesh of three axes stands behind that of two: it takes longer to solve."""
    together: float = 1.15
    """Estimates up to this much above the first one are looked at with it if they have as many micro-batches, whose
    program is the larger part of the work."""
    most_together: int = 3
    """Of these, so many with each."""
    slower_pipelines: float = 2.0
    """Pipelines up to so much above are played: what is known without stages may not fit into memory, and then become
    slower."""
    all_groups: int = 16
    """Rank groups, at most, where a pipeline of every number of them is planned."""

    # pipelines that nobody asked for: for how long

    pipeline_seconds: float = 8.0
    """That pipelines always get: what several pipelines of a small model take."""
    first_pipelines: int = 4
    """So many of the best estimates are compared within `first_pipeline_seconds`, so that a busy machine does not
    decide what is found for a small model. The first estimate, and those that are looked at with it, are compared in
    any case where they look faster: the program of a large model alone may take longer."""
    first_pipeline_seconds: float = 24.0
    """As above."""
    pipeline_share: float = 0.15
    """Of the CPU seconds of the search so far that are spent where pipelines do not look faster
    (`pipeline_estimates.py`)."""
    promising_pipeline_share: float = 0.5
    """The same where the first estimate looks faster (`look_faster`)."""
    sub_mesh_seconds: float = 3.0
    """Of one solve on a sub-mesh: without a memory limit most end sooner."""
    instead_seconds: float = 60.0
    """By the clock, for pipelines whose layouts are chosen under the memory limit, where nothing else fits."""

    # every pipeline

    parts_per_group: int = 8
    """Micro-batches per rank group: with 8, the bubble of 1F1B is below an eighth."""
    slower_counts: int = 2
    """Numbers of micro-batches that may be slower than the best one, one after the other, before no more are tried."""
    sub_mesh_memory: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    """Of the memory of all sub-meshes together, in which the whole program is planned on one of them."""
    settling_rounds: int = 4
    """How often a cut that holds too much when played is made again under a lower limit."""
    settling_safety: float = 0.99
    """Of the limit that would just fit, when the cut is made again."""
    spanned_pipelines: int = 3
    """Pipelines without a memory limit, the fastest ones, whose stages are cut into spans where blocks do not fit."""
    stage_rooms: tuple[float, ...] = (1.0, 0.93, 0.85, 0.7, 0.5, 0.35)
    """Parts of the room of a stage in which its spans are cut, as `nested_rooms`: until a smaller one is slower."""
    unequal_stages: int = 32
    """Of a pipeline on groups of different sizes, at most."""
    near_unequal: float = 1.5
    """Cuts with groups of one size are played if the search's formula gives them at most this much of the shortest."""
    sizes_per_part: int = 3
    """Sizes of rank groups that are tried per part of a cluster of several kinds, where none are given."""
    groups_of_parts: int = 8
    """Rank groups that numbers of micro-batches are chosen for there, where none are given."""
    searched_passes: int = 240
    """F, I and W of all stages and micro-batches of a pipeline whose order is searched: 4 ranks with 20 micro-batches
    take some seconds."""

    # what would fit where nothing does

    suggestion_seconds: float = 30.0
    """By the clock; after these no further change is tried, and those that were not are listed as such."""
    suggested_parts: int = 3
    """Numbers of micro-batches that are tried."""
    more_devices: tuple[int, ...] = (2, 4, 8)
    """Times as many devices that are tried."""

    # other sizes of a planned model

    kept_growth: float = 2.0
    """A plan is kept for graphs of up to so many times the input elements. Where it replicates what more tokens make
    worth splitting over two ranks, that costs at most a third of the best step; a loop of lengths from 16 to 512 plans
    six times at most."""


LIMITS = Limits()
