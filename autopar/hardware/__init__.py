"""Hardware: what a plan is made for.

In: presets (`cost_models/hardware/*.json`) or what was measured here. Out: devices and links as values (`devices`), the
cluster of them and who shares which link (`cluster`), the part of it that a stage has (`rank_groups`), constants of
kernels (`device_curves`), and a profile of the user's own device (`operator_profile`). Seconds are made of them in
`cost_models`.
"""
