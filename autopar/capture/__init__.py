"""Capture: an unmodified torch module -> a Program, one ATen graph of its forward and backward."""

from autopar.capture.captures import Captures, autocast_state
from autopar.capture.identity import fingerprint
from autopar.capture.inputs import normalize_example_inputs
from autopar.capture.models import load_model
from autopar.capture.trace import capture
from autopar.capture.wrappers import take_off_wrappers, without_wrappers

__all__ = [
    "Captures",
    "autocast_state",
    "capture",
    "fingerprint",
    "load_model",
    "normalize_example_inputs",
    "take_off_wrappers",
    "without_wrappers",
]
