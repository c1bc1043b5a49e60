"""Capture: an unmodified torch module -> a Program, one ATen graph of its forward and backward."""

from autopar.capture.identity import fingerprint
from autopar.capture.inputs import normalize_example_inputs
from autopar.capture.models import load_model
from autopar.capture.trace import capture

__all__ = ["capture", "fingerprint", "load_model", "normalize_example_inputs"]
