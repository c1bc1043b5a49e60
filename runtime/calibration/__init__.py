"""Calibration: what this machine or this job really does.

In: running processes. `measure_machine` starts `measuring_worker` processes, `measure_job` uses those of torchrun,
`profile_kernels` times single kernels of a GPU; what is measured is listed in `operator_census` and `product_census`.
Out: profiles that `autopar.hardware` reads.
"""
