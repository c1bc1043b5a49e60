"""A bound on the step of every pipeline of one block table: memory is no matter, and no transfer takes time.

    4 equal blocks of f = 1 s and t = 3 s, 2 ranks, 8 micro-batches, one stage each:
    rank 0 holds 2 blocks: 8 * 6 = 48 s at least; rank 1 starts behind their forward: 2 + 48 = 50 s at least

Whatever the schedule, the rank of stage s computes m t_s and its once-per-step work, and cannot begin before the first
micro-batch has passed the forward of the stages in front of it. A dynamic programme finds the cut for which the worst
rank is best:

    least[s][j] = min over i < j of  max(least[s - 1][i],  F(i) + m T(i, j) + once(i, j))

with F the forward of all blocks in front of i. Where a rank has several stages, they may be any blocks: then a rank has
at least the mean of all work and the largest block, and one micro-batch passes all blocks, there and back.

The seconds are those of the table, so the bound is one of its layouts, the fastest way of recomputation everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.planner.pipelines.block_table import BlockTable, Floats


def least_step_seconds(
    table: BlockTable,
    num_ranks: int,
    micro_batches: int,
    *,
    one_stage_each: bool = False,
    both_ways: bool = False,
) -> float:
    """Seconds that no schedule of these blocks is under. one_stage_each: ranks hold a contiguous run of blocks;
    both_ways: a block may stand on two ranks, of which each takes half of the micro-batches."""
    if one_stage_each:
        return _contiguous(table, num_ranks, micro_batches)
    work = micro_batches * table.seconds.min(axis=0) + table.once_seconds
    there_and_back = (table.forward_seconds + table.backward_seconds).min(axis=0).sum()
    return float(max(work.sum() / num_ranks, work.max() / (1 + both_ways), there_and_back))


def _contiguous(table: BlockTable, num_ranks: int, micro_batches: int) -> float:
    """infinity where there are fewer blocks than ranks."""
    return least_unequal_seconds([table], [table.devices] * num_ranks, micro_batches)


def least_unequal_seconds(tables: Sequence[BlockTable], sizes: Sequence[int], micro_batches: int) -> float:
    """The same for one stage on each of groups of so many devices, in order, over the tables of these sizes."""
    size = tables[0].num_blocks
    ahead = np.minimum.reduce([_before(table.forward_seconds.min(axis=0)) for table in tables])
    least = np.full(size + 1, np.inf)
    least[0] = 0.0
    for devices in sizes:
        runs = np.full((size + 1, size + 1), np.inf)
        for table in tables:
            if table.devices == devices:
                work = _before(micro_batches * table.seconds.min(axis=0) + table.once_seconds)
                runs = np.minimum(runs, ahead[:, None] + work[None, :] - work[:, None])
        runs[np.tril_indices(size + 1)] = np.inf
        least = np.maximum(least[:, None], runs).min(axis=0)
    return float(least[size])


def least_over_all_groups(tables: Sequence[BlockTable], num_devices: Sequence[int], micro_batches: int) -> float:
    """The same for any stages on the tables' sub-meshes, with so many devices in every device group: no block takes
    fewer device seconds than on the thriftiest of them, and the step is at least as long as the largest block on the
    fastest.

    A step of T holds T D_g device seconds of group g, so sum_g w_g T D_g is at least the sum over blocks of the least
    w_g times device seconds, for any weights; here w_g = 1 over those of all blocks on g, tight where the groups'
    speeds differ by the same factor in all blocks.
    """
    work = np.stack([micro_batches * table.seconds.min(axis=0) + table.once_seconds for table in tables])
    groups = sorted({table.group for table in tables})
    device_seconds = work * np.array([[table.devices] for table in tables])
    of_group = np.array([table.group for table in tables])
    thriftiest = np.stack([device_seconds[of_group == group].min(axis=0) for group in groups])
    weights = 1.0 / thriftiest.sum(axis=1)
    held = float(weights @ np.array([num_devices[group] for group in groups]))
    return float(max((thriftiest * weights[:, None]).min(axis=0).sum() / held, work.min(axis=0).max()))


def _before(values: Floats) -> Floats:
    """(N + 1,) sums of all values in front of each place."""
    return np.concatenate([[0.0], np.cumsum(values)])
