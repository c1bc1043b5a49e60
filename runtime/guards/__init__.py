"""Guards: what is looked at while a job runs, so that a run is right or says why not.

In: what each rank was given, does and holds. Out: nothing, or an error on every rank that names the rank, the value
and the mend.
"""
