"""Predicted beside measured on this machine: step time and peak memory of ten small models on gloo processes."""
