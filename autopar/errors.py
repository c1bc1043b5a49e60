"""Every error that autopar raises for a user: what went wrong, where, with numbers, and the next step.

`AutoparError` is the root, so `except autopar.AutoparError` catches them all. Broken invariants of our own code are
`AssertionError`s and never belong here.
"""


class AutoparError(Exception):
    """Root of all errors that autopar raises for a user."""


class ConfigurationError(AutoparError, ValueError):
    """An argument, option or file that cannot mean anything: unknown cluster, impossible dims, damaged plan file."""


class CaptureError(AutoparError):
    """The model cannot be captured as one graph: wrong inputs, data-dependent control flow, not a module."""


class UnsupportedOperatorError(AutoparError):
    """Operators without a sharding rule (only with `strict=True`; otherwise they are reported with their cost)."""


class InfeasibleError(AutoparError):
    """No plan fits the memory limit; the message says what is short and which change would fit."""


class HostMemoryError(AutoparError, MemoryError):
    """What a step copies to its host has no room there; the message says how much, of which budget."""


class PlanMismatchError(AutoparError):
    """A plan made for another model, world size or graph, or edited into an inconsistent state."""


class VerificationError(AutoparError):
    """The compiled model does not compute what the plain model computes."""


class GradientError(AutoparError, RuntimeError):
    """A backward pass that would give another gradient than that of what ran, or none."""


class BranchError(AutoparError):
    """A call whose values take another branch than the example inputs took at capture (only with `branches=`)."""


class RankMismatchError(AutoparError):
    """Ranks captured different graphs, or passed batches that cannot belong together."""


class RankLostError(AutoparError):
    """A rank did not deliver what another waits for: it has ended, or nothing reaches it any more."""
