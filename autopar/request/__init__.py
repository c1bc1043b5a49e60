"""The request: what a user asks beside a model and its inputs, in the user's words.

In: arguments of `compile` and `plan`, of the command line, of `what_if`. Each is checked here, before a model is
captured: axes and sizes (`mesh_axes`), stages (`pipeline_request`), bytes (`memory_limit`), what the search may not
choose (`constraints`) and how long it may look (`search_mode`). Out: a `Request`, which the planner reads.
"""

from autopar.request.checked_request import LossFunction, Request

__all__ = ["LossFunction", "Request"]
