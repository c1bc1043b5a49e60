"""Collectives on CPUs: ours in the place of gloo's.

In: tensors of a process group. `exchange` posts blocks to all ranks at once, `exchanged` makes collectives of
exchanges, `host_collectives` runs them, `host_graphs` puts them into graphs. Out: results, or an error that names the
rank which is missing (`lost_ranks`). Who starts one by reading a value meets the others first (`common_reads`).
"""
