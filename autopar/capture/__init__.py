"""Capture: an unmodified torch module -> a Program, one ATen graph of its forward and backward.

In: a module and example inputs, on any device, fake ones too. Out: a `Program` with roles, stable names and a
fingerprint (`trace`, `identity`), and, for one model at several sizes, all of them without tracing each (`captures`,
`family`). What a trace does not see stands in a module of its own: wrappers, effects, precision, random draws, mixtures
of experts, kernels of users. What cannot be one graph is a CaptureError with the line (`failures`).
"""

from autopar.capture.captures import Captures, autocast_state
from autopar.capture.identity import fingerprint
from autopar.capture.inputs import normalize_example_inputs
from autopar.capture.models import load_model
from autopar.capture.python_state import PythonState, differences
from autopar.capture.trace import capture
from autopar.capture.wrappers import take_off_wrappers, without_wrappers

__all__ = [
    "Captures",
    "PythonState",
    "autocast_state",
    "capture",
    "differences",
    "fingerprint",
    "load_model",
    "normalize_example_inputs",
    "take_off_wrappers",
    "without_wrappers",
]
