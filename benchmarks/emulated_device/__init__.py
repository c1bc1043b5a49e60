"""A CPU process that stands for an accelerator beside a host: a budget of bytes, and a link of a stated rate.

`device` is what to use; `link` moves copies at the rate of a `HostLink`, `budget` counts what lives on either side.
"""
